"""The notebook runs from top to bottom, offline, and shows what it shows now.

`pytest tests/test_notebook.py --update-golden` writes its outputs again.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from waiting import PATIENCE_SECONDS

NOTEBOOK = Path(__file__).parents[1] / "examples" / "plan.ipynb"
MAX_BYTES = 30_000  # of a notebook that people read in a diff


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """What each code cell printed."""
    return [
        "".join(output.get("text", "") for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> nbformat.NotebookNode:
    notebook: nbformat.NotebookNode = nbformat.read(NOTEBOOK, as_version=4)
    metadata = notebook.metadata.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CRATON_CATALOG", raising=False)
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        patch.setenv("CRATON_RUNS", str(tmp_path_factory.mktemp("runs")))
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        client = NotebookClient(notebook, timeout=PATIENCE_SECONDS, kernel_name="python3", record_timing=False)
        client.execute(cwd=str(NOTEBOOK.parent))
    notebook.metadata = metadata  # without the version of this Python
    return notebook


@pytest.mark.slow
def test_it_says_what_a_reader_came_for(executed: nbformat.NotebookNode) -> None:
    first, phases, micro_batches, clusters, limits, stopped, measured, resumed = printed(executed)
    assert "llama-3.1-8b on p5en.48xlarge x 16: fits" in first
    low, high = map(float, re.findall(r"between ([\d.]+) and ([\d.]+)", first)[0])
    step = float(re.findall(r"step +([\d.]+) s", first)[0])
    assert low < step < high
    (whole,) = re.findall(r"^step +([\d.]+) s", phases, re.MULTILINE)
    assert float(whole) == pytest.approx(total(phases), abs=0.003)
    memory = [int(share) for share in re.findall(r"(\d+)% of memory", micro_batches)]
    assert memory == sorted(memory)
    assert len(memory) == 3
    assert clusters.startswith("◆")
    assert len(clusters.splitlines()) == 6
    assert "relief: " in limits
    assert stopped == "from-notebook is stopped after step 10 on 2 ranks\n"
    assert "10 steps; the loss falls" in measured
    assert resumed == "from-notebook is stopped after step 15, in generation 1\n"


def total(phases: str) -> float:
    """The sum of the phases, as printed: their lines are not indented."""
    seconds = re.findall(r"^(?!step)\w+ +([\d.]+) s", phases, re.MULTILINE)
    assert len(seconds) == 5
    return sum(float(each) for each in seconds)


@pytest.mark.slow
def test_it_shows_what_it_prints_now(executed: nbformat.NotebookNode, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        NOTEBOOK.write_text(nbformat.writes(executed) + "\n", encoding="utf-8")
    stored = nbformat.read(NOTEBOOK, as_version=4)
    assert printed(stored) == printed(executed), "the notebook is stale: `pytest --update-golden` and read the diff"


def test_it_stays_small() -> None:
    assert NOTEBOOK.stat().st_size < MAX_BYTES
