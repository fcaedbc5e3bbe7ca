"""The layout of a served model: how many GPUs it needs, and how it reads."""

from craton.planning.serving.layout import ServedLayout


def test_the_gpus_of_a_layout_are_those_of_its_replicas() -> None:
    layout = ServedLayout(tp=2, pp=2, ep=8, attention_dp=4, replicas=3)
    assert (layout.stage_gpus, layout.replica_gpus, layout.gpus, layout.moe_tp) == (8, 16, 48, 1)
    assert ServedLayout(tp=8, ep=2).moe_tp == 4


def test_a_layout_names_the_sizes_above_one() -> None:
    assert str(ServedLayout()) == "tp 1"
    assert str(ServedLayout(tp=2, ep=4, attention_dp=4, replicas=3)) == "tp 2 · ep 4 · attention_dp 4 · replicas 3"
