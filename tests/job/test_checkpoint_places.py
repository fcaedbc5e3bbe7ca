"""Where the checkpoints of a run lie in each tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from craton.job import ContentError, JobError, parse_job
from craton.job.cluster import Storage, StorageNumbers
from craton.job.sections import place_of
from craton.job.sections.checkpoint import CheckpointTier

RUN = Path("/runs/llama")
STORAGE = Storage(
    nvme=StorageNumbers(path="/scratch/"), shared=StorageNumbers(path="/fsx"), object=StorageNumbers(path="s3://b/c")
)


@pytest.mark.parametrize(
    ("to", "storage", "place", "is_local", "is_inside"),
    [
        ("nvme", None, "/runs/llama/checkpoints/nvme", True, True),
        ("nvme", STORAGE, "/scratch/llama", True, False),
        ("shared", None, "/runs/llama/checkpoints/shared", False, True),
        ("shared", Storage(shared=StorageNumbers(kind="lustre")), "/runs/llama/checkpoints/shared", False, True),
        ("shared", STORAGE, "/fsx/llama", False, False),
        ("object", STORAGE, "s3://b/c/llama", False, False),
        ("s3://bucket/prefix/", STORAGE, "s3://bucket/prefix/llama", False, False),
        ("/data/here", STORAGE, "/data/here/llama", False, False),
    ],
)
def test_a_tier_lies_where_the_cluster_file_says(
    to: str, storage: Storage | None, place: str, is_local: bool, is_inside: bool
) -> None:
    found = place_of(CheckpointTier(to=to), storage, RUN)
    assert (found.place, found.is_node_local, found.is_inside_run) == (place, is_local, is_inside)
    assert found.is_url == place.startswith("s3://")


def test_an_object_tier_without_a_place_says_what_to_write() -> None:
    with pytest.raises(JobError, match=r"storage\.object\.path .* s3:// prefix in the cluster file"):
        place_of(CheckpointTier(to="object"), None, RUN)


def test_a_prefix_without_a_bucket_is_found_with_its_line() -> None:
    text = """kind: pretrain
model: llama-3.2-1b
data: {sequence: 128}
train: {global_batch_sequences: 8, steps: 10}
cluster: local
checkpoint: {tiers: [{to: "s3://"}]}
"""
    with pytest.raises(ContentError, match=r"job.yaml:6: .*'s3://' has no bucket; write s3://bucket/prefix"):
        parse_job(text)
