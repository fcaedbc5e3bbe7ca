"""A real engine with a small random model and its tokenizer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the tests find the small model
sys.path.insert(0, str(Path(__file__).parent))  # so that they find `strategy_runs`

from live_server import make_model
from strategy_runs import Strategies

from craton.ml.models import Decoder, config_from_huggingface, load_weights
from craton.ml.serving.engine.build import build_engine
from craton.ml.serving.settings import EngineSettings


@pytest.fixture(scope="session")
def strategies(tmp_path_factory: pytest.TempPathFactory) -> Strategies:
    folder = tmp_path_factory.mktemp("strategies")
    make_model(folder, 3)
    model = Decoder(config_from_huggingface(folder)).eval()
    load_weights(model, folder)
    settings = EngineSettings(max_length=256, blocks=400, max_running=16, page=4, chunk_tokens=64)
    return Strategies(build_engine(model, settings, stop_tokens=(0,), tokenizer_folder=folder), folder)
