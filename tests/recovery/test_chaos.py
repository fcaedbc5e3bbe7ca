"""Whatever breaks, training ends where it would have ended: random faults, drawn from seeds, over layouts.

`make chaos` runs all of them; the tests of every day a few. Two nodes with two ranks each on this machine.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rehearsed import LAYOUTS, events, expect_same_end, fired, killed_in, running, shared_memory, undisturbed

from craton.bench.recovery.rehearsal import Rehearsal
from craton.job import random_faults

STEPS = 40
NODES = ("node-0", "node-1")
INSIDE = ("staging", "saving", "checkpoint", "regroup", "restore")
# At these moments a run is most fragile: one fault of each kind of moment is in every list, the rest is drawn.
FRAGILE = {
    "fsdp": ("kill rank=1@during=staging,step=6", "kill rank=2@step=12", "kill rank=3@during=restore,step=12"),
    "hsdp": ("kill rank=0@during=saving,step=6", "kill rank=1@step=14", "kill rank=2@during=regroup,step=14"),
    "tp": ("kill rank=2@during=staging,step=9", "kill rank=0@step=15", "kill rank=1@during=restore,step=15"),
    "pp": ("kill rank=3@during=staging,step=7", "kill rank=1@step=13", "kill rank=0@during=regroup,step=13"),
    "experts": ("kill rank=1@during=saving,step=8", "kill rank=3@step=16", "kill rank=2@during=restore,step=16"),
    "hsdp experts": ("kill rank=2@during=staging,step=5", "kill rank=3@step=11", "kill rank=0@during=regroup,step=11"),
}
EVERY_DAY = {"hsdp experts": 2}  # layout → seed; the others are broken by `make chaos`
ALL = [(name, seed) for seed in (11, 12) for name in LAYOUTS]


def disturbed(runs: Path, name: str, seed: int, drawn: int) -> tuple[int, list[str]]:
    """Breaks a run by the fragile moments of its layout and by drawn faults; how many happened, and the moments in
    which ranks were killed inside of what handles faults."""
    expected = undisturbed(runs, name, STEPS)
    before = shared_memory()
    faults = [*FRAGILE[name]]
    faults += [fault.text for fault in random_faults(drawn, seed, STEPS - 2, 4, NODES, ("peer", "shared"), first=20)]
    rehearsal = Rehearsal(f"{name.replace(' ', '-')}-{seed}", steps=STEPS, chaos=faults, **LAYOUTS[name])
    with running(runs, rehearsal) as run:
        expect_same_end(run, expected, before)
        # one fault may undo another (the second rank to be killed in a restore that the first one ended), not most
        assert len(fired(run)) >= len(faults) - 2, (faults, fired(run))
        assert len(events(run, "recovered")) >= 3
        inside = [moment for moment in killed_in(run) if any(each in moment for each in INSIDE)]
        return len(fired(run)), inside


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), EVERY_DAY.items())
def test_a_disturbed_run_ends_like_a_calm_one(runs: Path, name: str, seed: int) -> None:
    _, inside = disturbed(runs, name, seed, drawn=2)
    assert inside


@pytest.mark.slow
def test_sixty_faults_of_all_kinds(runs: Path) -> None:
    found = [disturbed(runs, name, seed, drawn=4) for name, seed in ALL]
    assert sum(count for count, _ in found) >= 60, found
    assert sum(len(inside) for _, inside in found) >= 12, found
