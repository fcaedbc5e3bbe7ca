"""The commands that the batch script starts on the nodes: pure lists of words, for every way of having Python there.

Without `image:` the nodes run the Python of the virtual environment, which lies on a path they all see. An image is
started by pyxis (`srun --container-image`) or, when it is a .sif file or a library:// or oras:// address, by Apptainer;
Craton must be installed in it. What is started on the nodes runs in the image; the batch program itself does not, for
it needs Slurm's own tools.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import craton.orchestration.slurm.node as node_program
from craton.orchestration.draft import IMAGE_PYTHON

APPTAINER = ("library://", "oras://", "docker-archive://", "oci-archive://", "shub://")
NODE = "craton.orchestration.slurm.node"
# How long a node may take to have an image. Unpacking a large one took seven minutes (NVIDIA/pyxis#24), without the
# pull from a registry that all nodes ask at once.
IMAGE_SECONDS = 1800.0
HYPERPOD = Path("/opt/sagemaker_cluster")  # is there on the nodes of a SageMaker HyperPod cluster
COMPLAINT_LETTERS = 300
# What srun, slurmstepd and pyxis print after the cause, and what they tell beside it (NVIDIA/pyxis#61, #127, #168).
_BESIDE = re.compile(
    r"tasks? [\d,-]+: |Terminating StepId|[Jj]ob step aborted|^Try \"srun|spank|\[INFO\]|"
    r"pyxis: (?:couldn't start container|container start failed|if the image|import|printing)"
)


@dataclass(frozen=True)
class SlurmStep:
    """What is common to every step of a run."""

    run: Path
    python: str
    image: str = ""  # a file by its whole path (mounts.py)
    mounts: tuple[str, ...] = ()  # paths that are the same inside an image (mounts.py)
    gpus: bool = False
    cpus_per_task: int = 0  # 0: the whole node
    auto_resume: bool = False  # HyperPod replaces a node that fails during the step


def agents_command(step: SlurmStep, hosts: Sequence[str]) -> list[str]:
    """One agent on each of these hosts. A node that is lost does not end the others: the agents see to that."""
    program = [IMAGE_PYTHON, "-m", NODE] if step.image else [step.python, node_program.__file__]
    resume = ["--auto-resume=1"] if step.auto_resume else []
    keep = ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
    return [*_srun(step, hosts, [*resume, *keep]), *_inside(step, [*program, str(step.run)])]


def doctor_command(step: SlurmStep, hosts: Sequence[str], reports: Path, compute: bool = False) -> list[str]:
    """Pre-flight on each host, judged as a node of the run, with the self-test of its devices or without. It leaves its
    report in the folder by the number of its task: what Slurm calls a node need not be its host name, and the report
    says whose it is."""
    program = [IMAGE_PYTHON if step.image else step.python, "-m", "craton", "doctor", "--json"]
    program += ["--run", str(step.run), *(["--compute"] if compute else [])]
    options = [
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        f"--output={reports}/%t.json",
        f"--error={reports}/%t.err",
    ]
    return [*_srun(step, hosts, options), *_inside(step, program)]


def end_step(step: subprocess.Popen[bytes]) -> None:
    """Ends a step whose nodes may be gone: srun is told twice, for at the first time it only asks."""
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            step.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            step.wait(0.5)
            return


def complaint_of(printed: str) -> str:
    """The line that says why a step has started nothing: the last one that is not about what followed from it."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    telling = [line for line in lines if not _BESIDE.search(line)]
    return (telling or lines or [""])[-1][:COMPLAINT_LETTERS]


def uses_apptainer(image: str) -> bool:
    return image.endswith(".sif") or image.startswith(APPTAINER)


def _srun(step: SlurmStep, hosts: Sequence[str], options: Sequence[str]) -> list[str]:
    count = str(len(hosts))
    words = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={','.join(hosts)}"]
    # Binding one task to one core would leave the ranks of a whole node on it.
    words += ["--mpi=none", "--cpu-bind=none", "--export=ALL", *options]
    if step.cpus_per_task:  # srun does not take it over from sbatch (since 22.05)
        words.append(f"--cpus-per-task={step.cpus_per_task}")
    if step.image and not uses_apptainer(step.image):
        mounts = ",".join(f"{path}:{path}" for path in step.mounts)
        words += [f"--container-image={step.image}", f"--container-mounts={mounts}", "--no-container-mount-home"]
    return words


def _inside(step: SlurmStep, program: list[str]) -> list[str]:
    if not step.image or not uses_apptainer(step.image):
        return program
    gpus = ["--nv"] if step.gpus else []
    binds = [word for path in step.mounts for word in ("--bind", path)]
    return ["apptainer", "exec", *gpus, *binds, step.image, *program]
