"""The srun commands of the batch program, as pure lists of words, for a virtual environment or an image.

Without `image:` the nodes run the Python of the virtual environment, on a path that all of them see. pyxis starts an
image (`srun --container-image`); Apptainer starts a .sif file or a library:// or oras:// address. Craton must be
installed in the image. Agents and ranks run in the image; the batch program does not, because it needs Slurm's tools.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import craton.orchestration.slurm.node as node_program
from craton.orchestration.draft import IMAGE_PYTHON
from craton.orchestration.slurm.mounts import image_of, mounts_of
from craton.telemetry import RunDirectory

if TYPE_CHECKING:
    from craton.agent import Launch
    from craton.job import Job

APPTAINER = ("library://", "oras://", "docker-archive://", "oci-archive://", "shub://")
NODE = "craton.orchestration.slurm.node"
HYPERPOD = Path("/opt/sagemaker_cluster")  # exists on the nodes of a SageMaker HyperPod cluster
COMPLAINT_LETTERS = 300
# Lines of srun, slurmstepd and pyxis that follow the cause or are unrelated (NVIDIA/pyxis#61, #127, #168).
_BESIDE = re.compile(
    r"tasks? [\d,-]+: |Terminating StepId|[Jj]ob step aborted|^Try \"srun|spank|\[INFO\]|"
    r"pyxis: (?:couldn't start container|container start failed|if the image|import|printing)"
)


@dataclass(frozen=True)
class SlurmStep:
    """Settings common to all steps of a run."""

    run: Path
    python: str
    image: str = ""  # a file as an absolute path (mounts.py)
    mounts: tuple[str, ...] = ()  # same paths inside and outside the image (mounts.py)
    gpus: bool = False
    cpus_per_task: int = 0  # 0: the whole node
    auto_resume: bool = False  # HyperPod replaces a node that fails during the step
    name: str = ""  # of a member's step, which may share its nodes with the step of its owner


def slurm_step(job: Job, run: RunDirectory, launch: Launch, name: str = "") -> SlurmStep:
    """Return the settings of a run's steps on this node."""
    image = image_of(job, launch)
    gpus = launch.gpus_per_node or launch.ranks_per_node
    return SlurmStep(
        run=run.path,
        python=sys.executable,
        image=image,
        # Paths missing on this node cannot be mounted; the ranks report what they lack.
        mounts=tuple(path for path in mounts_of(job, run, launch) if Path(path).exists()) if image else (),
        gpus=launch.gpus,
        cpus_per_task=0 if job.run.exclusive else gpus * launch.threads_per_rank,
        auto_resume=HYPERPOD.exists() and not name,
        name=name,
    )


def agents_command(step: SlurmStep, hosts: Sequence[str]) -> list[str]:
    """Return the command that starts one agent per host. A lost node does not end the others: the agents handle it."""
    program = [IMAGE_PYTHON, "-m", NODE] if step.image else [step.python, node_program.__file__]
    resume = ["--auto-resume=1"] if step.auto_resume else []
    keep = ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
    keep += ["--overlap", f"--job-name={step.name}"] if step.name else []
    return [*_srun(step, hosts, [*resume, *keep]), *_inside(step, [*program, str(step.run)])]


def doctor_command(step: SlurmStep, hosts: Sequence[str], reports: Path, compute: bool = False) -> list[str]:
    """Return the command that runs pre-flight on each host, judged as a node of the run, with self-tests if `compute`.
    Reports are named by task number, because Slurm's node name may differ from the host name; each report names its
    node."""
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
    """End a step whose nodes may be lost: srun gets two SIGINT, because the first one only prompts."""
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            step.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            step.wait(0.5)
            return


def complaint_of(printed: str) -> str:
    """Return the line that says why a step started nothing: the last one that is not a consequence."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    telling = [line for line in lines if not _BESIDE.search(line)]
    return (telling or lines or [""])[-1][:COMPLAINT_LETTERS]


def uses_apptainer(image: str) -> bool:
    return image.endswith(".sif") or image.startswith(APPTAINER)


def _srun(step: SlurmStep, hosts: Sequence[str], options: Sequence[str]) -> list[str]:
    count = str(len(hosts))
    words = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={','.join(hosts)}"]
    # Binding the one task to one core would put all ranks of a node on it.
    words += ["--mpi=none", "--cpu-bind=none", "--export=ALL", *options]
    if step.cpus_per_task:  # srun does not inherit it from sbatch (since 22.05)
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
