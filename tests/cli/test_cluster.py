"""`craton cluster discover` and `craton cluster provision` as a user calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from waiting import PATIENCE_SECONDS

from craton.cli import main

TREE = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=g[1-4]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=g[5-8]
SwitchName=spine Level=1 LinkSpeed=1 Nodes=g[1-8] Switches=leaf[1-2]
"""
CLUSTER = """\
name: llm-train
instance: p5.48xlarge
nodes: 4
storage:
  shared: {path: /fsx, kind: lustre, megabytes_per_second_per_tib: 500, capacity_bytes: 48TiB}
scheduler: {kind: slurm, partition: train}
aws:
  region: us-east-2
  subnet: subnet-0123456789abcdef0
  key_name: my-key
  scripts: s3://my-scripts/train
"""


@dataclass
class Said:
    returncode: int
    stdout: str
    stderr: str


Craton = Callable[..., Said]


@pytest.fixture
def craton(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Craton:
    """`craton cluster WORDS`, in this process."""

    def call(*words: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["craton", "cluster", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capfd.readouterr()
        return Said(int(ended.value.code or 0), said.out, said.err)

    return call


@pytest.fixture
def tree(tmp_path: Path) -> str:
    path = tmp_path / "tree.txt"
    path.write_text(TREE)
    return str(path)


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return str(path)


def test_discover_says_what_it_found(craton: Craton, tree: str) -> None:
    done = craton("discover", "--from", tree)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "8 nodes in a tree topology",
        "spine: 1, of 1 x 8 nodes",
        "leaf: 2, of 2 x 4 nodes",
    ]


def test_discover_writes_for_schedulers(craton: Craton, tree: str, tmp_path: Path) -> None:
    done = craton(
        "discover", "--from", tree, "--write", "slurm-tree", "--write", "levels", "--out", str(tmp_path / "out")
    )
    assert done.returncode == 0, done.stderr
    assert "SwitchName=spine Switches=leaf[1-2]" in (tmp_path / "out" / "topology.conf").read_text()
    assert yaml.safe_load((tmp_path / "out" / "levels.yaml").read_text())["levels"]["leaf"]["nodes"] == 4


def test_discover_prints_one_format_alone(craton: Craton, tree: str) -> None:
    done = craton("discover", "--from", tree, "--write", "slurm-yaml")
    assert [entry["topology"] for entry in yaml.safe_load(done.stdout)] == ["tree"]


def test_discover_as_json(craton: Craton, tree: str) -> None:
    document = json.loads(craton("discover", "--from", tree, "--write", "levels", "--json").stdout)
    assert document["topology"]["levels"] == ["spine", "leaf"]
    assert document["topology"]["nodes"][0] == {"node": "g1", "path": ["spine", "leaf1"], "domain": ""}
    assert "levels.yaml" in document["files"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--from", "/nowhere"], "cannot be read"),
        (["--write", "slrm"], "is not a format; allowed: slurm-tree"),
        (["--write", "kueue"], "node labels"),
        (["--write", "slurm-tree", "--write", "slurm-block"], "also written to topology.conf"),
        (["--names", "/nowhere/names.json"], "--names /nowhere/names.json: cannot be read"),
    ],
)
def test_discover_refuses_in_one_line(craton: Craton, tree: str, words: list[str], said: str) -> None:
    done = craton("discover", *(words if "--from" in words else ["--from", tree, *words]))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert said in line


def test_the_same_format_twice_is_written_once(craton: Craton, tree: str) -> None:
    once = craton("discover", "--from", tree, "--write", "levels")
    assert craton("discover", "--from", tree, "--write", "levels", "--write", "levels") == once


def test_names_that_are_no_text_are_refused(craton: Craton, tree: str, tmp_path: Path) -> None:
    (tmp_path / "names").write_bytes(b"\xff\xfe")
    done = craton("discover", "--from", tree, "--names", str(tmp_path / "names"))
    assert done.returncode == 2
    assert "cannot be read" in done.stderr


def test_discover_asks_the_slurm_that_is_here(craton: Craton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "scontrol"
    tool.write_text(f"#!/bin/sh\ntest \"$*\" = 'show topology' && cat <<'END'\n{TREE}END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = craton("discover")
    assert done.stdout.startswith("8 nodes"), done.stderr


def test_provision_writes_files_and_creates_nothing(craton: Craton, cluster: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = craton("provision", cluster, "--for", "parallelcluster", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "nothing was created" in done.stdout
    assert yaml.safe_load((out / "cluster.yaml").read_text())["Region"] == "us-east-2"
    assert os.access(out / "scripts" / "setup.sh", os.X_OK)
    assert "pcluster create-cluster" in (out / "README.md").read_text()


def test_provision_as_a_rehearsal(craton: Craton, cluster: str, tmp_path: Path) -> None:
    done = craton("provision", cluster, "--for", "parallelcluster", "--dry-run", "--out", str(tmp_path / "out"))
    assert done.stdout.startswith("=== cluster.yaml\nRegion: us-east-2\n")
    assert not (tmp_path / "out").exists()
    document = json.loads(craton("provision", cluster, "--for", "parallelcluster", "--dry-run", "--json").stdout)
    assert document["target"] == "parallelcluster"
    assert "cluster.yaml" in document["files"]
    assert document["steps"][0].startswith("pip wheel --no-deps --wheel-dir scripts")
    assert document["steps"][1].startswith("aws s3 cp --recursive scripts s3://my-scripts/train")


def test_provision_tells_everything_that_is_missing(craton: Craton, cluster: str) -> None:
    done = craton("provision", cluster, "--for", "pcs", "--dry-run", "--json")
    assert done.returncode == 2
    problems = json.loads(done.stdout)["problems"]
    assert [problem.split(" is missing")[0] for problem in problems] == ["llm-train: aws.vpc", "llm-train: aws.image"]
    assert done.stderr.count("error: ") == 2


def test_provision_needs_a_place_and_a_kind(craton: Craton, cluster: str) -> None:
    assert "use --out DIR" in craton("provision", cluster, "--for", "eks").stderr
    unknown = craton("provision", cluster, "--for", "eksx", "--dry-run")
    assert unknown.returncode == 2
    assert "allowed: parallelcluster, hyperpod-slurm" in unknown.stderr


def test_no_cloud_is_asked(cluster: str, tmp_path: Path) -> None:
    """A Python in which every connection is an error."""
    (tmp_path / "sitecustomize.py").write_text(
        "import socket\n"
        "def refuse(*_, **__): raise AssertionError('a connection was made')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
    )
    command = [sys.executable, "-m", "craton", "cluster", "provision", cluster, "--for", "parallelcluster", "--dry-run"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
