"""The members of a drafted run: their jobs, checks of their names and order, and what the run needs for them.

All members are checked before anything starts. Each is planned and drafted when its turn comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from craton.agent import Launch
from craton.formatting import counted
from craton.job import FaultError, Job, check_member, dump_job, parse_fault
from craton.job.document import is_name
from craton.nearest import did_you_mean
from craton.orchestration.errors import StartError
from craton.orchestration.process_commands import agent_command, manager_command
from craton.telemetry.members import (
    JOBS_FOLDER,
    MEMBERS_FILE,
    MEMBERS_FOLDER,
    RESERVED_NAMES,
    MemberSpec,
    MembersSpec,
    members_text,
)

MAX_MEMBERS = 1000
MAX_MEMBER_NAME = 40  # characters: names appear in tables, and in paths of sockets and jobs


@dataclass(frozen=True)
class Members:
    """The runs that a run is about to own."""

    spec: MembersSpec
    jobs: Mapping[str, Job] = field(default_factory=dict)  # by name; empty if their files are already written
    owner: Job | None = None  # the job of the run itself, if its members change it

    def files(self) -> dict[str, str]:
        """Return name → text of the files that a launch writes for them."""
        if not self.jobs:
            return {}
        folders = {name: str(job.folder.absolute()) for name, job in self.jobs.items()}
        spec = replace(
            self.spec, members=[replace(item, folder=folders.get(item.name, item.folder)) for item in self.spec.members]
        )
        jobs = {f"{JOBS_FOLDER}/{name}.yaml": dump_job(job) for name, job in self.jobs.items()}
        return {MEMBERS_FILE: members_text(spec), **jobs}


def checked_members(owner: Job, members: Members) -> tuple[Job, Members]:
    """Return owner and members with each fault at the run that it is for; StartError for members that cannot be."""
    names = [item.name for item in members.spec.members]
    if problem := members_problem(members.spec.members) or (_jobs_problem(members) if members.jobs else ""):
        raise StartError(problem)
    if owner.run.copies > 1:
        raise StartError(f"{owner.where('run', 'copies')}a run with members has no copies; remove run.copies")
    if not isinstance(owner.chaos, tuple):
        return owner, members
    jobs, own = dict(members.jobs), []
    for text in owner.chaos:
        fault = parse_fault(text)
        try:
            check_member(fault, names)
        except FaultError as error:
            raise StartError(f"{owner.where('chaos')}{error}") from None
        if fault.member is None:
            own.append(text)
        elif (job := jobs.get(fault.member)) is not None and isinstance(job.chaos, tuple):
            jobs[fault.member] = job.model_copy(update={"chaos": (*job.chaos, text)})
    named = {name: job.model_copy(update={"name": name}) for name, job in jobs.items()}
    return owner.model_copy(update={"chaos": tuple(own)}), replace(members, jobs=named)


def check_no_member_faults(job: Job, run: Path) -> None:
    """Refuse faults in members of a run that has none; a member may name itself."""
    itself = (run.name,) if run.parent.name == MEMBERS_FOLDER else ()
    for text in job.chaos if isinstance(job.chaos, tuple) else ():
        try:
            check_member(parse_fault(text), itself)
        except FaultError as error:
            raise StartError(f"{job.where('chaos')}{error}") from None


def members_problem(members: Sequence[MemberSpec]) -> str:
    """Return what is wrong with the names or the order of these members, in one line; "" if nothing."""
    names = [item.name for item in members]
    if len(names) > MAX_MEMBERS:
        return f"{len(names):,} members are more than a run can own ({MAX_MEMBERS:,}); use fewer"
    folded: dict[str, str] = {}
    for name in names:
        if not is_name(name) or len(name) > MAX_MEMBER_NAME:
            shown = name if len(name) <= MAX_MEMBER_NAME else f"{name[:MAX_MEMBER_NAME]}…"
            return (
                f"{shown!r} is not a name of a member; use up to {MAX_MEMBER_NAME} letters, digits, '.', '_' and '-', "
                "e.g. rollout-0"
            )
        if name in RESERVED_NAMES:
            return f"{name!r} cannot be the name of a member: a file of the run has it; use another name"
        if name.casefold() in folded:  # some file systems do not tell a from A
            return f"two members are called {folded[name.casefold()]!r} and {name!r}; give each a name of its own"
        folded[name.casefold()] = name
    for item in members:
        for name in item.needs:
            if name == item.name:
                return f"member {name} needs itself; remove that need"
            if name not in names:
                return f"member {item.name} needs {name!r}, which is not a member{did_you_mean(name, names)}"
    if circle := _circle({item.name: list(item.needs) for item in members}):
        return f"members need each other in a circle: {' → '.join(circle)}; remove one of these needs"
    return ""


def report_launch(
    job: Job, run: Path, generation: int, environment: Mapping[str, str], port: int, backend: str, python: str
) -> Launch:
    """Return the launch of a run that only reports on its members: one rank of this Python, without torch and GPUs."""
    return Launch(
        generation=generation,
        nodes=["node-0"],
        ranks_per_node=1,
        command=manager_command(run, "--report", python=python),
        env=dict(environment),
        master_port=port,
        early_seconds=0.0,
        tries=job.recover.tries,
        agent_command=agent_command(run) if backend == "local" else [],  # elsewhere the node restarts it
    )


def _jobs_problem(members: Members) -> str:
    wanted = {item.name for item in members.spec.members if not item.is_kept}
    if missing := sorted(wanted - set(members.jobs)):
        return f"{counted(len(missing), 'member')} without a job: {', '.join(missing)}"
    ports: dict[int, str] = {}
    for name, job in members.jobs.items():
        if job.serve is None:
            continue
        if job.serve.port in ports:
            other = ports[job.serve.port]
            return f"members {other} and {name} both listen on port {job.serve.port}; give each a serve.port of its own"
        ports[job.serve.port] = name
    return ""


def _circle(needs: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names along a circle of needs, the first one again at the end; [] if there is none."""
    done: set[str] = set()
    for start in needs:
        path: list[str] = []
        stack = [(start, iter(needs[start]))] if start not in done else []
        while stack:
            name, rest = stack[-1]
            if name not in path:
                path.append(name)
            following = next((item for item in rest if item not in done), None)
            if following is None:
                done.add(name)
                path.pop()
                stack.pop()
            elif following in path:
                return [*path[path.index(following) :], following]
            else:
                stack.append((following, iter(needs[following])))
    return []
