"""Bytecode of packages that were installed without any is kept in the cache folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from craton.agent.processes.bytecode import bytecode_environment


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package without bytecode, which this process can find."""
    (tmp_path / "plain_package").mkdir()
    (tmp_path / "plain_package" / "__init__.py").write_text("NUMBER = 5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "plain_package"


def imports(package: str, environment: dict[str, str]) -> None:
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", f"import {package}"], env={**environment, **paths}, check=True)


def test_bytecode_is_kept_although_the_container_forbids_it(package: str, tmp_path: Path) -> None:
    environment = {"PYTHONDONTWRITEBYTECODE": "1", "CRATON_CACHE": str(tmp_path / "cache")}
    environment |= bytecode_environment(environment, package)
    imports(package, environment)
    assert list((tmp_path / "cache" / "bytecode").rglob("plain_package/__init__*.pyc"))
    assert not (tmp_path / package / "__pycache__").exists()


def test_installed_bytecode_is_used(package: str, tmp_path: Path) -> None:
    imports(package, {})
    assert list((tmp_path / package / "__pycache__").iterdir())
    assert bytecode_environment({"CRATON_CACHE": str(tmp_path / "cache")}, package) == {}


def test_the_users_folder_is_kept(package: str, tmp_path: Path) -> None:
    assert bytecode_environment({"PYTHONPYCACHEPREFIX": str(tmp_path)}, package) == {}


def test_a_missing_package_needs_none() -> None:
    assert bytecode_environment({}, "no_such_package") == {}
