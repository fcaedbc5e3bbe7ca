"""Every query of every dashboard against real Prometheus on a live run, a server and simulated nodes."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator

import pytest
from observability.dashboards.asking import EVERYTHING, answer, filled_in
from observability.dashboards.watched_cluster import EVERY_SECONDS, HERE, P5EN, RUN, SERVER, Cluster, watched_cluster
from waiting import PATIENCE_SECONDS

from craton.agent.processes import free_port
from craton.observability.dashboards.boards import BOARDS
from craton.observability.dashboards.model import Board, Panel, PanelQuery

# Served by what this machine can neither have nor simulate honestly: an FSx file system, Slurm 25.11, Kueue, NCCL's
# inspector; nor by this server, which has no draft model. Prometheus takes the queries; that they find something is not
# shown here.
UNSEEN = re.compile(r"\b(?:aws_fsx_|slurm_|kueue_|nccl_|craton_serve_draft_speedup)")
# Of InfiniBand's ports, which the lab's node alone has.
OF_LAB = re.compile(r"\bnode_infiniband_(?:port|symbol|link)_")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: `make observers` installs it where it may")
    with watched_cluster(tmp_path_factory.mktemp("cluster"), free_port()) as found:
        yield found


@pytest.fixture(scope="module")
def answers(cluster: Cluster) -> dict[tuple[str, str, str], list[dict[str, dict[str, str]]]]:
    """(board, panel, expression) → series, once everything has moved for long enough that rates are known."""
    open_questions = {(board.name, panel.title, query.expr): (board, panel, query) for board, panel, query in _all()}
    found: dict[tuple[str, str, str], list[dict[str, dict[str, str]]]] = {}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while open_questions and time.monotonic() < deadline:
        began = time.monotonic()
        cluster.move()
        for key, (board, panel, query) in list(open_questions.items()):
            if series := answer(cluster, panel, _alone(query), _choice(board, query)):
                found[key] = series
                del open_questions[key]
        if all(UNSEEN.search(key[2]) for key in open_questions):
            break
        time.sleep(max(0.0, EVERY_SECONDS - (time.monotonic() - began)))
    return found


def test_every_query_returns_data(answers: dict[tuple[str, str, str], list[dict[str, dict[str, str]]]]) -> None:
    """What no laptop serves comes from the simulated nodes, all else from a run, a server and this very machine."""
    empty = [
        (board.name, panel.title, filled_in(query.expr, _choice(board, query)))
        for board, panel, query in _all()
        if (board.name, panel.title, query.expr) not in answers and not UNSEEN.search(query.expr)
    ]
    assert not empty, "\n".join(f"{name}: {title}: {expr}" for name, title, expr in empty)


def test_legends_name_labels_that_are_there(
    answers: dict[tuple[str, str, str], list[dict[str, dict[str, str]]]],
) -> None:
    for board, panel, query in _all():
        series = answers.get((board.name, panel.title, query.expr))
        if series is None:
            continue
        for label in re.findall(r"\{\{(\w+)\}\}", query.legend):
            assert any(each["metric"].get(label) for each in series), f"{board.name}: {panel.title}: no {label}"
        if panel.opens:
            assert any(each["metric"].get(panel.opens) for each in series), f"{panel.title} has no {panel.opens}"


def test_lines_can_be_told_apart(answers: dict[tuple[str, str, str], list[dict[str, dict[str, str]]]]) -> None:
    """Two series of one query that have the same legend are a label that was forgotten."""
    for board, panel, query in _all():
        if panel.kind == "table" or (board.name, panel.title, query.expr) not in answers:
            continue
        named = [
            re.sub(r"\{\{(\w+)\}\}", lambda match, each=each: each["metric"].get(match[1], ""), query.legend)  # type: ignore[misc]
            for each in answers[board.name, panel.title, query.expr]
        ]
        assert len(named) == len(set(named)), f"{board.name}: {panel.title}: {named}"


def test_columns_of_a_table_have_the_same_rows(
    answers: dict[tuple[str, str, str], list[dict[str, dict[str, str]]]],
) -> None:
    """Grafana merges columns by labels: a column with others makes rows of its own."""
    for board in BOARDS:
        for panel in board.panels:
            if panel.kind == "table":
                keys = {
                    frozenset(each["metric"])
                    for query in panel.queries
                    for each in answers.get((board.name, panel.title, query.expr), ())
                }
                if len(panel.queries) > 1:
                    assert len(keys) == 1, f"{panel.title}: {keys}"


def test_a_choice_is_a_filter(
    cluster: Cluster, answers: dict[tuple[str, str, str], list[dict[str, dict[str, str]]]]
) -> None:
    """Whoever chooses a run, node or leaf that is not there sees nothing."""
    for board, panel, query in _all():
        for variable in set(re.findall(r"\$([a-z]+)", query.expr)):
            chosen = {**_choice(board, query), variable: "no.such*one"}
            assert not answer(cluster, panel, _alone(query), chosen), f"{board.name}: {panel.title} ignores {variable}"


def test_rates_are_of_counters_by_prometheus_own_word(
    cluster: Cluster, answers: dict[tuple[str, str, str], list[dict[str, dict[str, str]]]]
) -> None:
    kinds = {name: rows[0]["type"] for name, rows in cluster.ask("/api/v1/metadata").items()}
    seen = 0
    for board, panel, query in _all():
        for name in re.findall(r"\b(?:rate|increase|irate)\(([\w:]+)", query.expr):
            if UNSEEN.match(name):
                continue
            base = re.sub(r"_(?:bucket|sum|count)$", "", name)
            kind = kinds.get(name) or kinds.get(base) or kinds.get(name.removesuffix("_total"))
            assert kind in ("counter", "histogram"), f"{board.name}: {panel.title}: {name} is a {kind}"
            seen += 1
        for name in re.findall(r"\b(?:deriv|delta|\w+_over_time)\(([\w:]+)", query.expr):
            assert kinds[name] == "gauge", f"{board.name}: {panel.title}: {name}"
    assert seen > 50


def test_variables_offer_what_there_is(cluster: Cluster) -> None:
    for board in BOARDS:
        for variable in board.variables:
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable.query)
            assert match, variable.query
            values = cluster.ask(f"/api/v1/label/{match[2]}/values", **{"match[]": match[1]})
            expected = {"node": P5EN, "leaf": "leaf-2", "run": SERVER if board.name == "serving" else RUN}
            assert expected[variable.name] in values, f"{board.name}: {variable.name} offers {values}"


def test_annotations_tell_of_alerts_that_fire(cluster: Cluster, answers: object) -> None:
    from craton.observability.dashboards.grafana import all_dashboards

    for board in BOARDS:
        (annotation,) = all_dashboards()[board.name]["annotations"]["list"]
        chosen = {variable.name: EVERYTHING for variable in board.variables}
        series = cluster.ask("/api/v1/query", query=filled_in(annotation["expr"], chosen))["result"]
        assert any(each["metric"]["alertname"] == "GpuXidReboot" for each in series), board.name


def _all() -> Iterator[tuple[Board, Panel, PanelQuery]]:
    for board in BOARDS:
        for panel, query in board.queries:
            yield board, panel, query


def _choice(board: Board, query: PanelQuery) -> dict[str, str | tuple[str, ...]]:
    """All of everything where there is an All, else the one it is about: of what any machine serves, this machine."""
    node = P5EN if query.hardware_only else HERE
    run = (SERVER, RUN) if board.name == "serving" else (RUN, "other.run")
    chosen: dict[str, str | tuple[str, ...]] = {"run": run, "node": node, "leaf": EVERYTHING}
    if OF_LAB.search(query.expr):
        chosen["node"] = EVERYTHING
    return chosen


def _alone(query: PanelQuery) -> PanelQuery:
    """Without what always answers."""
    return PanelQuery(query.expr.removesuffix(" or vector(0)"), query.legend)
