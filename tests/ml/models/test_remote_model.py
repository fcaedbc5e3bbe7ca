"""A model folder at an s3:// URL: its config is enough for a plan, its weights come when they are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from published import save_published

from craton.infrastructure.storage import copy_down
from craton.job import parse_job
from craton.ml.models import Decoder, config_from_huggingface, config_from_shape, load_weights

JOB = """\
kind: pretrain
model: URL
data: {sequence: 8}
train: {tokens: 1K, global_batch_sequences: 8}
cluster: p5.48xlarge
"""


def test_a_model_in_an_object_store_is_fetched_when_it_is_loaded(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRATON_CACHE", str(tmp_path / "cache"))
    llama = save_published("llama", tmp_path / "llama")
    url = f"{bucket}/models/llama"
    copy_down(llama, url, seal="config.json")
    job = parse_job(JOB.replace("URL", url))
    assert job.model_shape is not None
    folder = job.weights_folder
    assert folder is not None
    assert not list(folder.glob("*.safetensors"))
    expected = Decoder(config_from_huggingface(llama))
    load_weights(expected, llama)
    config = config_from_shape(job.model_shape)
    found = Decoder(config)
    load_weights(found, folder)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
