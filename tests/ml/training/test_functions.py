"""A user's own code: found beside the job file, and named when it fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import SHAPE

from craton.ml.functions import FunctionError, load_function, search_folder, user_code
from craton.ml.models import Decoder, DecoderConfig
from craton.ml.training import Batch
from craton.ml.training.objectives import Objective, batch_loss


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_loss.py").write_text("def loss(a, b):\n    c = a + b\n    return c / 0\n\nANSWER = 42\n")
    (tmp_path / "own_broken.py").write_text("import os\nraise RuntimeError('not today')\n")
    (tmp_path / "own_needs.py").write_text("import no_such_package\n")
    search_folder(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


def test_what_a_function_raises_names_it_with_file_and_line(folder: Path) -> None:
    function = load_function("own_loss:loss")
    with pytest.raises(FunctionError) as caught, user_code(function, "own_loss:loss"):
        function(1, 2)
    assert str(caught.value) == f"own_loss:loss raised ZeroDivisionError: division by zero ({folder}/own_loss.py:3)"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own_los:loss", r"no module 'own_los' in .* give the name of a file beside the job file"),
        ("own_loss:los", r"own_loss\.py has no function 'los'; it has loss"),
        ("own_loss:ANSWER", r"has no function 'ANSWER'"),
        ("own_broken:f", r"raised RuntimeError: not today on import \(.*own_broken\.py:2\)"),
        ("own_needs:f", r"could not be imported: No module named 'no_such_package' \(.*own_needs\.py:1\)"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_function_that_cannot_be_loaded_says_why(name: str, said: str) -> None:
    with pytest.raises(FunctionError, match=said):
        load_function(name)


RETURNED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "no report": (lambda log_probs: -log_probs.sum(), r"it returned Tensor\."),
    "a number to report": (lambda log_probs: (-log_probs.sum(), {"a": 1.0}), "it returned Tensor and dict"),
    "no sum": (lambda log_probs: (-log_probs, {}), r"the sum has shape \[1, 4\]"),
    "a reported row": (lambda log_probs: (-log_probs.sum(), {"a": log_probs}), r"a has shape \[1, 4\]"),
    "nothing to learn": (lambda log_probs: (torch.zeros(()), {}), "does not depend on log_probs"),
}


@pytest.mark.parametrize("case", RETURNED)
def test_an_objective_that_returns_something_else_is_told_what_to_return(case: str) -> None:
    function, said = RETURNED[case]
    model = Decoder(DecoderConfig(SHAPE))
    model.initialize(0)
    row = torch.arange(4)[None]
    batch = Batch(tokens=row, labels=row, positions=row, documents=None, weight=torch.ones(1, 4))
    with pytest.raises(FunctionError, match=f"own:loss must return .*{said}"):
        batch_loss(model, batch, Objective("own:loss", lambda log_probs, _: function(log_probs)), torch.tensor(4.0))
