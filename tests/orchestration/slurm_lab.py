"""A real Slurm on this machine: a controller and eight nodes of eight pretend GPUs on two leaves, each node a slurmd.

It starts in half a second and leaves nothing behind. Everything it knows lies in one folder, and it listens only at
loopback addresses, so several can run side by side. It needs root (slurmd does) and the packages slurmctld, slurmd,
slurm-client and munge; `make slurm` installs them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import PATIENCE_SECONDS, wait_until

from craton.agent.processes import free_port

NEEDED = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")
NODES = tuple(f"g{number}" for number in range(1, 9))
LEAVES = {"leaf1": NODES[:4], "leaf2": NODES[4:]}
NO_HOLD = ",nohold_on_prolog_fail"
START_SECONDS = PATIENCE_SECONDS
END_SECONDS = 8.0

CONFIG = """\
ClusterName=lab
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoAddrCache
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=1
SlurmdParameters=config_overrides
SlurmctldTimeout=30
SlurmdTimeout={slurmd_timeout}
InactiveLimit=0
KillWait=2
MessageTimeout=3
TCPTimeout=1
MinJobAge=300
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_resolution=60,sched_interval=1,batch_sched_delay=0,sched_min_interval=0,\
requeue_delay=0,max_switch_wait=86400,preempt_youngest_first,nohold_on_prolog_fail
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
TopologyPlugin=topology/tree
PriorityType=priority/multifactor
PriorityWeightPartition=1000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
JobRequeue=1
Licenses=solver:1
Prolog={folder}/prolog.sh
PrologFlags=Alloc
HealthCheckProgram={folder}/health.sh
HealthCheckInterval=2
HealthCheckNodeState=ANY
AccountingStorageType=accounting_storage/none
"""
PARTITIONS = """\
PartitionName=train Nodes=g[1-8] Default=YES MaxTime=INFINITE PriorityTier=10 PriorityJobFactor=1 State=UP
PartitionName=short Nodes=g[1-8] MaxTime=5 MaxNodes=4 PriorityTier=10 PriorityJobFactor=1 State=UP
PartitionName=low Nodes=g[1-8] MaxTime=INFINITE PriorityTier=1 GraceTime=15 State=UP
PartitionName=urgent Nodes=g[1-8] MaxTime=INFINITE PriorityTier=20 PreemptMode=OFF State=UP
PartitionName=closed Nodes=g[1-8] MaxTime=INFINITE State=DOWN
"""
# A file in the folder makes a node's prolog fail, or its health check drain it with the file's text as the reason.
PROLOG = """\
#!/bin/sh
[ -e {folder}/prolog-fails.$SLURMD_NODENAME ] && exit 1
exit 0
"""
HEALTH = """\
#!/bin/sh
bad={folder}/unhealthy.$SLURMD_NODENAME
[ -e $bad ] && SLURM_CONF={folder}/slurm.conf scontrol update nodename=$SLURMD_NODENAME state=drain reason="$(cat $bad)"
exit 0
"""


class SlurmLab:
    def __init__(self, slurmd_timeout: int = 5) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurmlab-", dir="/tmp"))  # short: it holds a socket
        self.config = self.folder / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.config)}
        self._write(slurmd_timeout)

    def start(self) -> None:
        munge_key = self.folder / "munge.key"
        subprocess.run(["mungekey", "-c", "-k", str(munge_key)], check=True, capture_output=True)
        self._run(
            *("munged", "--force", f"--key-file={munge_key}", f"--socket={self.folder}/munge.sock"),
            *(f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/log/munged.log"),
            *(f"--seed-file={self.folder}/munged.seed", "--num-threads=2"),
        )
        self._run("slurmctld", "-f", str(self.config))
        for node in NODES:
            self.start_node(node)
        wait_until(lambda: len(self.nodes_in("idle")) == len(NODES), "all nodes are idle", START_SECONDS)

    def stop(self) -> None:
        """Ends every process of the lab, those of its jobs too."""
        with contextlib.suppress(subprocess.SubprocessError):
            self.cancel_all()
        deadline = time.monotonic() + END_SECONDS
        while (pids := self._processes()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        shutil.rmtree(self.folder, ignore_errors=True)
        assert not pids, f"left behind: {pids}"

    # -- asking and telling ---------------------------------------------------------------------------------------

    def __call__(self, *words: str) -> str:
        """What a tool of Slurm prints."""
        return self._run(*words)

    def submit(self, *options: str, command: str = "exec sleep 600") -> str:
        """Any other job; its number."""
        return self("sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={command}").strip()

    def occupy(self, *nodes: str, minutes: int = 30, partition: str = "train") -> str:
        """A job that holds these nodes; returns when it runs."""
        hosts = f"--nodelist={','.join(nodes)}"
        number = self.submit(
            hosts, f"--nodes={len(nodes)}", "--exclusive", f"--time={minutes}", f"--partition={partition}"
        )
        with contextlib.suppress(AssertionError):
            wait_until(lambda: self.state(number) == "RUNNING", f"job {number} runs")
        assert self.state(number) == "RUNNING", self("squeue") + self("sinfo", "-N", "-p", "train", "-o", "%N %t %E")
        return number

    def state(self, number: str) -> str:
        return self("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T").strip()

    def reason(self, number: str) -> str:
        return self("squeue", "--noheader", f"--jobs={number}", "--format=%r").strip()

    def nodes_of(self, number: str) -> list[str]:
        listed = self("squeue", "--noheader", f"--jobs={number}", "--format=%N").strip()
        return self("scontrol", "show", "hostnames", listed).split() if listed else []

    def nodes_in(self, state: str) -> list[str]:
        listed = self("sinfo", "--noheader", "--Node", "--partition=train", "--format=%N %t").split("\n")
        return [line.split()[0] for line in listed if line.split()[1:] == [state]]

    def cancel_all(self) -> None:
        """What runs is killed first: a job that is only cancelled has time to leave."""
        for pid in self._processes(of_jobs=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self("scancel", "--quiet", "--user=root")
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self("squeue", "--noheader"), "the queue is empty", END_SECONDS)

    # -- what happens to nodes ------------------------------------------------------------------------------------

    def start_node(self, node: str) -> None:
        self._run("slurmd", "-f", str(self.config), "-N", node)

    def kill_node(self, node: str) -> None:
        """The node is gone at once: its slurmd, and every process of every job on it."""
        # Stopped first, and children before their parents: a machine that loses power has no process left that could
        # tell of another's end, nor is one hung up on by the kernel because its parent went.
        pids = sorted({self._pid(node), *self._processes(node)}, reverse=True)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def set_down(self, node: str, reason: str = "taken down") -> None:
        self("scontrol", "update", f"nodename={node}", "state=down", f"reason={reason}")

    def drain(self, node: str, reason: str) -> None:
        self("scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}")

    def make_unhealthy(self, node: str, reason: str) -> None:
        (self.folder / f"unhealthy.{node}").write_text(reason)

    def break_prolog(self, node: str) -> None:
        (self.folder / f"prolog-fails.{node}").touch()

    def hold_after_prolog(self, is_held: bool = True) -> None:
        """Whether Slurm holds a job whose prolog failed, as it does where it is not told otherwise."""
        text = self.config.read_text().replace(NO_HOLD, "")
        self.config.write_text(
            text if is_held else text.replace("preempt_youngest_first", f"preempt_youngest_first{NO_HOLD}")
        )
        self("scontrol", "reconfigure")

    def mend_prologs(self) -> None:
        """Those that failed stay drained."""
        for path in self.folder.glob("prolog-fails.*"):
            path.unlink()

    def mend(self) -> None:
        """Every node as it was in the beginning, and nothing in the queue."""
        self.mend_prologs()
        for path in self.folder.glob("unhealthy.*"):
            path.unlink()
        if NO_HOLD not in self.config.read_text():
            self.hold_after_prolog(False)
        self.cancel_all()
        for node in NODES:
            if not _is_alive(self._pid(node)):
                self.start_node(node)
        wait_until(self._resumed, "all nodes are idle again")

    def _resumed(self) -> bool:
        idle = self.nodes_in("idle")
        for node in NODES:
            if node not in idle:
                with contextlib.suppress(AssertionError):  # one that needs no resuming is on its way
                    self("scontrol", "update", f"nodename={node}", "state=resume")
        return len(idle) == len(NODES)

    # -- files and processes --------------------------------------------------------------------------------------

    def _write(self, slurmd_timeout: int) -> None:
        for name in ("state", "spool", "log", "dev"):
            (self.folder / name).mkdir()
        self.folder.chmod(0o755)
        for number in range(8):
            os.mknod(self.folder / "dev" / f"gpu{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        ports = _free_ports(len(NODES) + 1)
        nodes = [
            f"NodeName={node} NodeHostname={node} NodeAddr=127.0.1.{number} Port={port} CPUs=16 RealMemory=2000 "
            "Gres=gpu:h100:8 Feature=h100 State=UNKNOWN"
            for number, (node, port) in enumerate(zip(NODES, ports[1:], strict=True), start=1)
        ]
        config = CONFIG.format(folder=self.folder, port=ports[0], slurmd_timeout=slurmd_timeout)
        self.config.write_text(config + "\n".join(nodes) + "\n" + PARTITIONS)
        (self.folder / "gres.conf").write_text(f"NodeName=g[1-8] Name=gpu Type=h100 File={self.folder}/dev/gpu[0-7]\n")
        switches = [f"SwitchName={leaf} Nodes={','.join(nodes)}" for leaf, nodes in LEAVES.items()]
        (self.folder / "topology.conf").write_text("\n".join([*switches, "SwitchName=spine Switches=leaf[1-2]", ""]))
        for name, text in {"prolog.sh": PROLOG, "health.sh": HEALTH}.items():
            (self.folder / name).write_text(text.format(folder=self.folder))
            (self.folder / name).chmod(0o755)

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}{done.stdout}"
        return done.stdout

    def _pid(self, node: str) -> int:
        try:
            return int((self.folder / f"slurmd-{node}.pid").read_text())
        except (OSError, ValueError):
            return 0

    def _processes(self, node: str = "", of_jobs: bool = False) -> list[int]:
        """Those that carry the lab's configuration in their environment or on their command line; or of one node, or
        those of jobs."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == os.getpid():
                continue
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            is_ours = f"SLURM_CONF={self.config}".encode() in environment or str(self.folder).encode() in words
            if of_jobs and not any(word.startswith(b"SLURM_JOB_ID=") for word in environment):
                continue
            if not is_ours or not words:
                continue
            is_of_node = f"SLURMD_NODENAME={node}".encode() in environment or f"[{node}]".encode() in words
            # A step's own process has its number and no name; slurmd starts it with the node's spool folder.
            if not node or is_of_node or f"/spool/{node}".encode() in words:
                found.append(int(entry.name))
        return found


def missing_reason() -> str:
    """Why there can be no lab here; empty where there can."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"Slurm is not installed ({', '.join(missing)} missing): `make slurm` as root installs it"
    if os.geteuid() != 0:
        return "a Slurm of several nodes on one machine needs root"
    return ""


@pytest.fixture(scope="session")
def slurm_lab() -> Iterator[SlurmLab]:
    """One for all tests of a worker."""
    if reason := missing_reason():
        pytest.skip(reason)
    lab = SlurmLab()
    try:
        lab.start()
        yield lab
    finally:
        lab.stop()


@pytest.fixture
def slurm(slurm_lab: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmLab]:
    """The lab as the tools of this process find it, whole and empty again after each test."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_lab.config))
    yield slurm_lab
    slurm_lab.mend()


def _free_ports(count: int) -> list[int]:
    """All different."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def _is_alive(pid: int) -> bool:
    try:
        return pid > 0 and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
