"""Options of the whole suite. `pytest --update-golden` rewrites the golden files from what the code prints now."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from keepers import keepers  # noqa: F401 - a fixture of every test
from s3 import bucket, faults, s3_server  # noqa: F401 - fixtures of every test
from waiting import wait_until

QUICK = ("planning", "infrastructure", "job", "telemetry", "data", "kernels", "models")  # folders of short tests

# Several workers, gangs of ranks and servers share the cores: threads of one would only wait for those of another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A suite started in the background inherits an ignored Ctrl-C, and so would every command it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


# No property test reads a clock, and `make test` tries the same cases every time. `make test-all` draws new ones: it
# chooses the profile `drawn` and prints the seed that draws them again.
_CLOCKLESS: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "database": None}
settings.register_profile("fixed", derandomize=True, **_CLOCKLESS)
settings.register_profile("drawn", print_blob=True, **_CLOCKLESS)
settings.load_profile("fixed")


# What the collection makes is a million objects that live to the end: the garbage collector need not walk them.
gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files instead of comparing with them")


@pytest.hookimpl(tryfirst=True)  # before the plugin that reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For several workers (`-n 3 --dist loadgroup --no-loadscope-reorder`): one of them has the gang of ranks and
    begins with its tests, one the Slurm of this machine, files stay whole. Files of quick tests come last, so that no
    worker ends long before the others."""
    if not getattr(config.option, "loadgroup", False):  # as workers have it
        return
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        group = next((name for name in ("gang", "slurm_lab") if name in fixtures), item.nodeid.partition("::")[0])
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: ("gang" not in getattr(item, "fixturenames", ()), item.path.parent.name in QUICK))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("name.txt", text)` compares text with golden/name.txt beside the test file."""
    folder = Path(request.path).parent / "golden"
    update = bool(request.config.getoption("--update-golden"))

    def compare(name: str, text: str) -> None:
        path = folder / name
        if update:
            folder.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), f"no golden file {path.name}: write it with `pytest --update-golden` and read the diff"
        expected = path.read_text(encoding="utf-8")
        assert text == expected, (
            f"{path.name} differs; if the change is meant, `pytest --update-golden` and read the diff"
        )

    return compare


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system can only be mounted by root")
    try:
        yield folder
    finally:
        # A process that was killed holds its files for a moment longer.
        wait_until(lambda: subprocess.run(["umount", str(folder)], capture_output=True, check=False).returncode == 0)
