"""Limits of open files, memory and CPUs, as processes meet them."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

from waiting import PATIENCE_SECONDS

from craton.limits import cpu_quota, explain, limit_hint, memory_limit

SERVER = """
import asyncio, logging, resource, socket
from craton.limits import name_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
logging.basicConfig()
logging.getLogger("asyncio").addFilter(name_limit)
async def main():
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    with open("/dev/null") as one:
        clients, seen = [], asyncio.Event()
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: (loop.default_exception_handler(context), seen.set()))
        try:
            while True:
                client = socket.socket()
                clients.append(client)
                client.setblocking(False)
                client.connect_ex(address)
        except OSError:
            pass
        clients.pop().close()
        await asyncio.wait_for(seen.wait(), 60)
asyncio.run(main())
"""
RAISED = """
import resource
from craton.limits import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
assert raise_file_limit(150) == ""
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (200, 200)
print(raise_file_limit(300))
"""


SHORT = """
import resource
from craton.limits import file_shortage
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
print(repr(file_shortage()))
held = []
try:
    while True:
        held.append(open("/dev/null"))
except OSError:
    pass
print(file_shortage())
held.pop().close()
print(file_shortage())
"""


def cgroups(root: Path, listed: str, **files: str) -> Path:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text(listed)
    (root / "proc" / "meminfo").write_text("MemTotal:       16777216 kB\nMemFree: 5 kB\n")
    for name, text in files.items():
        path = root / "sys" / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_tightest_limit_of_nested_cgroups_counts(tmp_path: Path) -> None:
    files = {
        "pods/one/memory.max": "max\n",
        "pods/memory.max": "536870912\n",
        "pods/one/cpu.max": "max 100000\n",
        "pods/cpu.max": "150000 100000\n",
    }
    root = cgroups(tmp_path, "0::/pods/one\n", **files)
    size, source = memory_limit(root)
    assert size == 512 << 20
    assert source == f"the memory limit of the cgroup {root}/sys/fs/cgroup/pods"
    assert cpu_quota(root) == 2


def test_cgroups_of_version_1(tmp_path: Path) -> None:
    files = {
        "memory/job/memory.limit_in_bytes": "1073741824\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "cpu/job/cpu.cfs_quota_us": "400000\n",
        "cpu/job/cpu.cfs_period_us": "100000\n",
        "cpu/cpu.cfs_quota_us": "-1\n",
    }
    root = cgroups(tmp_path, "4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n", **files)
    assert memory_limit(root)[0] == 1 << 30
    assert cpu_quota(root) == 4


def test_without_cgroups_the_machine_is_the_limit(tmp_path: Path) -> None:
    root = cgroups(tmp_path, "")
    assert memory_limit(root) == (16 << 30, "the memory of this machine")
    assert cpu_quota(root) is None


def test_errors_name_the_limit_and_the_remedy() -> None:
    assert "`ulimit -n`" in explain(OSError(errno.EMFILE, "Too many open files"))
    assert "fs.file-max" in explain(OSError(errno.ENFILE, "Too many open files in system"))
    assert "--mem in Slurm" in explain(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert "iB; raise the limit" in explain(MemoryError())
    assert explain(OSError(errno.ENOENT, "No such file")) == "[Errno 2] No such file"
    assert limit_hint("ValueError: 5") == ""
    assert "may open" in limit_hint("OSError: [Errno 24] Too many open files: 'x'")


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    told = subprocess.run([sys.executable, "-c", RAISED], capture_output=True, text=True, check=True).stdout
    assert told.startswith("this process may open 200 files (`ulimit -n`) and needs 300; `ulimit -n 65536` before")


def test_a_process_that_has_nearly_all_its_files_open_is_warned() -> None:
    told = subprocess.run([sys.executable, "-c", SHORT], capture_output=True, text=True, check=True).stdout
    before, without, nearly = told.splitlines()
    assert before == "''"
    assert "this process may open 40 files (`ulimit -n`, hard limit 40)" in without
    assert "files are open: this process may open 40 files" in nearly


def test_a_server_without_descriptors_says_which_limit_it_met() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", SERVER], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    ).stderr
    assert "this process may open 24 files (`ulimit -n`, hard limit 24)" in printed
