"""A real Slurm of processes on this machine: a controller and four nodes, each of them a slurmd.

Everything it knows lies in one folder, and it listens only at loopback addresses, so several can run side by side. It
needs root and the packages slurmctld, slurmd, slurm-client and munge; `make slurm` installs them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from craton.agent.processes import free_port

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")
NODES = tuple(f"g{number}" for number in range(1, 5))
START_SECONDS = 60.0
STOP_SECONDS = 10.0

CONFIG = """\
ClusterName=bench
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
SlurmdTimeout=5
InactiveLimit=0
KillWait=2
MessageTimeout=10
TCPTimeout=2
MinJobAge=300
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_resolution=60,sched_interval=1,batch_sched_delay=0,sched_min_interval=0,\
requeue_delay=0,preempt_youngest_first
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PriorityType=priority/multifactor
PriorityWeightPartition=1000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
Licenses=solver:1
Prolog={folder}/prolog.sh
PrologFlags=Alloc
AccountingStorageType=accounting_storage/none
"""
PARTITIONS = """\
PartitionName=train Nodes=g[1-4] Default=YES MaxTime=INFINITE PriorityTier=10 PriorityJobFactor=1 State=UP
PartitionName=short Nodes=g[1-4] MaxTime=5 MaxNodes=2 PriorityTier=10 PriorityJobFactor=1 State=UP
PartitionName=low Nodes=g[1-4] MaxTime=INFINITE PriorityTier=1 State=UP
PartitionName=urgent Nodes=g[1-4] MaxTime=INFINITE PriorityTier=20 PreemptMode=OFF State=UP
PartitionName=closed Nodes=g[1-4] MaxTime=INFINITE State=DOWN
"""
# A file in the folder makes the prolog of a node fail.
PROLOG = "#!/bin/sh\n[ -e {folder}/prolog-fails.$SLURMD_NODENAME ] && exit 1\nexit 0\n"


class LocalSlurm:
    """Started by `start`; `stop` ends every process of it and of its jobs."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="craton-slurm-", dir="/tmp"))  # short: it holds a socket
        self.config = self.folder / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.config)}
        for name in ("state", "spool", "log"):
            (self.folder / name).mkdir()
        self.folder.chmod(0o755)
        ports = _free_ports(len(NODES) + 1)
        nodes = [
            f"NodeName={node} NodeHostname={node} NodeAddr=127.0.1.{number} Port={port} CPUs=16 RealMemory=2000 "
            "Feature=cpu State=UNKNOWN"
            for number, (node, port) in enumerate(zip(NODES, ports[1:], strict=True), start=1)
        ]
        self.config.write_text("\n".join([CONFIG.format(folder=self.folder, port=ports[0]), *nodes, PARTITIONS]))
        prolog = self.folder / "prolog.sh"
        prolog.write_text(PROLOG.format(folder=self.folder))
        prolog.chmod(0o755)

    def start(self) -> None:
        key = self.folder / "munge.key"
        self("mungekey", "-c", "-k", str(key))
        self(
            *("munged", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.sock", "--num-threads=2"),
            *(f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/log/munged.log"),
            f"--seed-file={self.folder}/munged.seed",
        )
        self("slurmctld", "-f", str(self.config))
        for node in NODES:
            self.start_node(node)
        deadline = time.monotonic() + START_SECONDS
        while len(self.nodes_in("idle")) < len(NODES):
            if time.monotonic() > deadline:
                raise TimeoutError(f"Slurm has no {len(NODES)} idle nodes after {START_SECONDS:g} seconds")
            time.sleep(0.2)

    def stop(self) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        while (pids := self._processes()) and time.monotonic() < deadline:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        shutil.rmtree(self.folder, ignore_errors=True)
        if pids:
            raise RuntimeError(f"processes of Slurm survived SIGKILL: {pids}")

    def __call__(self, *command: str) -> str:
        """Return what a Slurm command prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}{done.stdout}")
        return done.stdout

    def submit(self, *options: str, command: str = "exec sleep 600") -> str:
        """Submit another job; return its number."""
        return self("sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={command}").strip()

    def occupy(self, *nodes: str, partition: str = "train") -> str:
        """Submit a job that holds these nodes; return once it runs."""
        hosts = f"--nodelist={','.join(nodes)}"
        number = self.submit(hosts, f"--nodes={len(nodes)}", "--exclusive", "--time=30", f"--partition={partition}")
        deadline = time.monotonic() + START_SECONDS
        while self.state(number) != "RUNNING":
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {number} does not run: {self('squeue')}")
            time.sleep(0.2)
        return number

    def state(self, number: str) -> str:
        return self("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T").strip()

    def job_numbers(self) -> list[str]:
        """Numbers of the jobs in the queue, oldest first."""
        return sorted(self("squeue", "--noheader", "--format=%i").split(), key=int)

    def nodes_of(self, number: str) -> list[str]:
        listed = self("squeue", "--noheader", f"--jobs={number}", "--format=%N").strip()
        return self("scontrol", "show", "hostnames", listed).split() if listed else []

    def nodes_in(self, state: str) -> list[str]:
        listed = self("sinfo", "--noheader", "--Node", "--partition=train", "--format=%N %t").splitlines()
        return [line.split()[0] for line in listed if line.split()[1:] == [state]]

    def update_node(self, node: str, state: str, reason: str) -> None:
        self("scontrol", "update", f"nodename={node}", f"state={state}", f"reason={reason}")

    def break_prolog(self, node: str) -> None:
        (self.folder / f"prolog-fails.{node}").touch()

    def start_node(self, node: str) -> None:
        self("slurmd", "-f", str(self.config), "-N", node)

    def kill_node(self, node: str) -> None:
        """End a node as a power loss does: its slurmd and every process of every job on it."""
        pids = sorted({*self._processes(node), *self._daemon(node)}, reverse=True)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _daemon(self, node: str) -> list[int]:
        try:
            return [int((self.folder / f"slurmd-{node}.pid").read_text())]
        except (OSError, ValueError):
            return []

    def _processes(self, node: str = "") -> list[int]:
        """Processes with this configuration in their environment or on their command line; or those of one node."""
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
            # A step's own process has a number and no name; slurmd starts it with the node's spool folder.
            is_of_node = f"SLURMD_NODENAME={node}".encode() in environment or f"/spool/{node}".encode() in words
            if words and is_ours and (not node or is_of_node):
                found.append(int(entry.name))
        return found


def slurm_missing() -> str:
    """Why there can be no Slurm on this machine; empty if there can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"Slurm is not installed ({', '.join(missing)} missing): `make slurm` as root installs it"
    return "" if os.geteuid() == 0 else "a Slurm of several nodes on one machine needs root"


def _free_ports(count: int) -> list[int]:
    """Return this many different ports that nothing listens on."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)
