"""What is known of checkpoints before any rank lives: the newest step in any tier, and tiers that cannot be used."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from s3 import S3Server, bucket, s3_server

from craton.infrastructure import StorageError
from craton.job import Job, parse_job
from craton.job.sections import place_of
from craton.orchestration import StartError
from craton.orchestration.start import newest_checkpoint
from craton.orchestration.start.checks import check_places
from craton.telemetry import RunDirectory
from craton.telemetry.members import MEMBERS_FOLDER

__all__ = ["bucket", "s3_server"]

JOB = """name: count
kind: pretrain
model: llama-3.2-1b
data: {sequence: 128}
train: {global_batch_sequences: 8, steps: 10}
cluster: local
checkpoint: {tiers: [TIERS]}
"""


def job_with(*tiers: str) -> Job:
    return parse_job(JOB.replace("TIERS", ", ".join(f'{{to: "{tier}"}}' for tier in tiers)))


def test_the_newest_step_is_found_on_nodes_in_folders_and_in_s3(
    tmp_path: Path, bucket: str, s3_server: S3Server
) -> None:
    run = RunDirectory.create(tmp_path, "count")
    job = job_with("nvme", str(tmp_path / "other"), f"{bucket}/prefix")
    assert newest_checkpoint(run, job) is None
    for folder in (run.checkpoints("nvme") / "node-1" / "step-00000005", tmp_path / "other/count/step-00000004"):
        folder.mkdir(parents=True)
        (folder / "COMPLETE").touch()
    found = newest_checkpoint(run, job)
    assert found is not None
    assert (found.step, found.tier) == (5, "nvme")
    name = bucket.removeprefix("s3://")
    s3_server.replace(name, "prefix/count/step-00000006/COMPLETE", b"{}")
    s3_server.replace(name, "prefix/count/step-00000007/checksums.json", b"{}")
    found = newest_checkpoint(run, job)
    assert found is not None
    assert (found.step, str(found.path)) == (6, f"{bucket}/prefix/count/step-00000006")
    s3_server.delete_bucket(name)
    found = newest_checkpoint(run, job)
    assert found is not None
    assert found.step == 5, "what S3 cannot tell does not hide what is here"
    with pytest.raises(StorageError, match="there is no bucket"):
        newest_checkpoint(run, job_with(f"{bucket}/prefix"))


def test_a_tier_that_cannot_be_written_is_refused_before_the_start(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_places(job_with("nvme", "shared", f"{bucket}/prefix", str(tmp_path / "new")), tmp_path / "count")
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match=r"job.yaml:7: checkpoint tier .*/file cannot be written: .*Not a directory"):
        check_places(job_with(str(tmp_path / "file")), tmp_path / "count")
    with pytest.raises(StartError, match=r"job.yaml:7: checkpoint tier s3://no-such: .*there is no bucket no-such"):
        check_places(job_with("s3://no-such"), tmp_path / "count")
    place = rf"job.yaml:7: checkpoint tier {bucket}: "
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        with pytest.raises(StartError, match=place + r".*S3 cannot be reached \(2 attempts\)"):
            check_places(job_with(bucket), tmp_path / "count")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StartError, match=place + "no credentials for S3: set AWS_ACCESS_KEY_ID"):
        check_places(job_with(bucket), tmp_path / "count")


def test_a_read_only_folder_is_refused_before_the_start(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        with pytest.raises(StartError, match=r"checkpoint tier .*/disk cannot be written: .*Read-only file system"):
            check_places(job_with(str(disk)), tmp_path / "count")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_members_of_two_runs_share_no_place_in_a_tier(tmp_path: Path) -> None:
    places = set()
    for owner in ("one", "two"):
        run = RunDirectory.create(RunDirectory.create(tmp_path, owner).path / MEMBERS_FOLDER, "base")
        (tier,) = job_with("s3://bucket/saved").checkpoint.tiers
        places.add(place_of(tier, None, run.path).place)
    assert places == {"s3://bucket/saved/one/base", "s3://bucket/saved/two/base"}
