"""What a user sees of a plan in the terminal, the words its numbers are written in, and its JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import date

import pytest
from rich.console import Console

from craton import formatting
from craton.job.layout import Layout
from craton.planning import Plan
from craton.planning.report import findings, plan_to_json, render_front, render_plan

Golden = Callable[[str, str], None]
START = date(2026, 11, 20)


def printed(plan: Plan, width: int = 100, start: date | None = None, front: bool = False) -> str:
    console = Console(width=width, file=io.StringIO())
    if front:
        render_front(plan, console)
    else:
        render_plan(plan, console, start)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


@pytest.fixture(params=["giant_plan", "small_plan", "unfit_plan"])
def any_plan(request: pytest.FixtureRequest) -> Plan:
    plan = request.getfixturevalue(request.param)
    assert isinstance(plan, Plan)
    return plan


class TestTerminal:
    def test_giant_reads_as_before(self, giant_plan: Plan, golden: Golden) -> None:
        golden("giant_plan.txt", printed(giant_plan, start=START))

    def test_small_reads_as_before(self, small_plan: Plan, golden: Golden) -> None:
        golden("small_plan.txt", printed(small_plan))

    def test_unfit_reads_as_before(self, unfit_plan: Plan, golden: Golden) -> None:
        golden("unfit_plan.txt", printed(unfit_plan))

    def test_front_reads_as_before(self, small_plan: Plan, golden: Golden) -> None:
        golden("small_front.txt", printed(small_plan, front=True))

    @pytest.mark.parametrize("width", [80, 100, 120])
    def test_nothing_is_cut_off(self, any_plan: Plan, width: int) -> None:
        text = printed(any_plan, width, START)
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        # Wrapped lines joined again, every sentence is whole.
        words = " ".join(text.split())
        for alternative in any_plan.alternatives:
            assert formatting.duration(alternative.step_seconds) in words
        for warning in any_plan.warnings:
            assert warning in words

    def test_fits_a_screen_and_a_half(self, giant_plan: Plan) -> None:
        assert len(printed(giant_plan, 100, START).splitlines()) <= 70

    def test_no_escape_codes_without_a_terminal(self, any_plan: Plan) -> None:
        assert "\x1b" not in printed(any_plan)

    def test_colour_on_a_terminal(self, giant_plan: Plan) -> None:
        console = Console(width=100, file=io.StringIO(), force_terminal=True, color_system="standard")
        render_plan(giant_plan, console)
        assert isinstance(console.file, io.StringIO)
        assert "\x1b[" in console.file.getvalue()

    def test_markup_in_words_is_text(self, small_plan: Plan) -> None:
        words = "[red]x[/red] :boom:"
        assert small_plan.cost is not None
        plan = replace(
            small_plan,
            job=words,
            profile=words,
            cost=replace(small_plan.cost, purchase=words),
            goodput=replace(small_plan.goodput, method=words),
            alternatives=[replace(small_plan.alternatives[0], reason=words)],
            front=[replace(small_plan.front[0], cluster=words, reason=words)],
            sensitivities=[replace(small_plan.sensitivities[0], name=words)],
            warnings=[words],
        )
        assert " ".join(printed(plan, 200).split()).count(words) == 7
        assert printed(plan, 200, front=True).count(words) >= 3

    def test_says_whether_the_profile_is_calibrated(self, giant_plan: Plan, small_plan: Plan) -> None:
        uncalibrated = " ".join(printed(giant_plan).split())
        assert "uncalibrated: wide interval; `craton calibrate` with 3 or more logged runs narrows it" in uncalibrated
        assert "uncalibrated" not in printed(small_plan)

    def test_says_when_a_price_is_stale(self, giant_plan: Plan, small_plan: Plan) -> None:
        assert "(118 days old)" in " ".join(printed(giant_plan).split())
        assert "days old" not in printed(small_plan)

    def test_says_when_no_price_is_known(self, unfit_plan: Plan) -> None:
        text = " ".join(printed(unfit_plan).split())
        assert "no price known for dgx-h100; put yours in the cluster file" in text
        assert "$" not in text

    def test_end_day_only_with_a_start_and_for_days(self, giant_plan: Plan, unfit_plan: Plan) -> None:
        assert "20 Feb 2027" in printed(giant_plan, start=START)
        assert "done" not in printed(giant_plan)
        assert "done" not in printed(unfit_plan, start=START)

    def test_front_always_shows_the_chosen(self, small_plan: Plan) -> None:
        others = [each for each in small_plan.front if each.layout != small_plan.layout]
        text = printed(replace(small_plan, front=others), front=True)
        assert "◆ p5en.48xlarge x 16" in text

    def test_front_without_prices(self, small_plan: Plan) -> None:
        unpriced = [replace(each, cost_dollars=None) for each in small_plan.front]
        text = printed(replace(small_plan, front=unpriced, cost=None), front=True)
        assert "no price is known for any of them" in text
        assert "fastest" in text

    def test_step_of_milliseconds_keeps_its_digits(self, small_plan: Plan) -> None:
        def shrink(table: dict[str, float]) -> dict[str, float]:
            return {name: seconds / 1000 for name, seconds in table.items()}

        tiny = replace(
            small_plan,
            step_seconds=small_plan.step_seconds / 1000,
            phases=shrink(small_plan.phases),
            parts={phase: shrink(parts) for phase, parts in small_plan.parts.items()},
        )
        assert "5.871" in printed(tiny)


class TestFindings:
    def test_parts_shown_add_up_to_their_phase(self, any_plan: Plan) -> None:
        for phase, seconds in any_plan.phases.items():
            assert sum(part for _, part in findings.shown_parts(any_plan, phase)) == pytest.approx(seconds)

    def test_small_parts_become_one_sum(self, giant_plan: Plan) -> None:
        parts = {"a": 6.0, "b": 0.01, "c": 0.02, "d": 0.0}
        plan = replace(giant_plan, parts={"compute": parts})
        assert findings.shown_parts(plan, "compute") == [("a", 6.0), ("2 smaller parts", pytest.approx(0.03))]

    def test_layout_change_names_only_what_differs_in_the_order_of_layouts(self) -> None:
        chosen = Layout(pp=4, fsdp=8, tp=8, vpp=2, schedule="interleaved")
        other = Layout(fsdp=32, tp=8, micro_batch=2, recompute="full", offload="optimizer", zero=2)
        expected = "pp 1 · fsdp 32 · vpp 1 · zero 2 · micro_batch 2 · recompute full · offload optimizer"
        assert findings.layout_change(chosen, other) == expected
        assert findings.layout_change(chosen, chosen) == "the same layout"

    def test_dominated_clusters_are_not_on_the_front(self, small_plan: Plan) -> None:
        off = [each.cluster for each in small_plan.front if not findings.is_on_front(each, small_plan.front)]
        assert off == ["p5en.48xlarge x 32"]

    def test_goodput_says_what_a_better_interval_gains(self, giant_plan: Plan) -> None:
        hourly = replace(giant_plan.goodput, interval_seconds=3600.0, goodput=0.81)
        assert "would gain" in findings.goodput_text(replace(giant_plan, goodput=hourly))
        assert "no other interval gains" in findings.goodput_text(giant_plan)

    def test_mixture_of_experts_says_its_active_parameters(self, small_plan: Plan) -> None:
        model = replace(small_plan.model, experts=8, top_k=2, moe_ffn_hidden=14336)
        assert "active)" in findings.verdict(replace(small_plan, model=model))


class TestJson:
    def test_headline_keys(self, any_plan: Plan) -> None:
        document = plan_to_json(any_plan)
        assert document["interval_level"] == 0.8
        assert document["layout"]["tp"] == any_plan.layout.tp
        assert document["step_seconds_low"] < document["step_seconds"] < document["step_seconds_high"]
        assert sum(document["phases"].values()) == pytest.approx(document["step_seconds"])
        assert document["tokens_per_second"] == any_plan.tokens_per_second
        assert document["mfu"] == any_plan.mfu
        assert document["memory_bytes"] == any_plan.memory_bytes
        assert document["memory_limit_bytes"] == any_plan.memory_limit_bytes
        assert document["goodput"] == any_plan.goodput.goodput
        assert document["goodput_detail"]["method"] == any_plan.goodput.method
        assert document["bottleneck"]["relief"] == any_plan.bottleneck.relief
        assert len(document["alternatives"]) == len(any_plan.alternatives)
        assert document["fits"] is any_plan.fits

    def test_cost_is_a_number_or_null(self, giant_plan: Plan, unfit_plan: Plan) -> None:
        priced, unpriced = plan_to_json(giant_plan), plan_to_json(unfit_plan)
        assert giant_plan.cost is not None
        assert priced["cost_dollars"] == giant_plan.cost.cost_dollars
        assert priced["cost"]["price_date"] == "2026-07-20"
        assert unpriced["cost_dollars"] is None
        assert unpriced["cost"] is None

    def test_survives_strict_json(self, any_plan: Plan) -> None:
        document = plan_to_json(any_plan)
        assert json.loads(json.dumps(document, allow_nan=False)) == document

    def test_infinity_becomes_null(self, unfit_plan: Plan) -> None:
        assert plan_to_json(unfit_plan)["goodput_detail"]["mean_hours_between_failures"] is None

    def test_every_field_of_a_plan_is_there(self, small_plan: Plan) -> None:
        assert {field.name for field in fields(Plan)} <= set(plan_to_json(small_plan))

    def test_price_dates_are_iso(self, small_plan: Plan) -> None:
        assert plan_to_json(small_plan)["cluster"]["price"]["date"] == "2026-09-19"
