"""The command line of bubblewrap: namespaces for everything, read-only libraries, one folder in memory to write to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import PurePosixPath

from craton.ml.verifiers.sandbox.confinement import FOLDER, SHARED_MEMORY_BYTES, Confinement
from craton.ml.verifiers.sandbox.seccomp import filter_descriptor


def bubblewrap_command(command: Sequence[str], confinement: Confinement) -> list[str]:
    """Return the command that runs another one confined. It reads the filter of system calls from a descriptor that
    this opens."""
    arguments = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    arguments += ["--die-with-parent", "--new-session", "--hostname", "sandbox", "--cap-drop", "ALL"]
    # Root keeps its namespace of users and changes to another user: see SandboxLimits.processes.
    if confinement.is_root:
        arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        arguments += ["--unshare-user"]
    mounts = confinement.mounts()
    # bubblewrap makes missing parents for their owner alone, which is not the user inside.
    for folder in sorted({str(parent) for inside in mounts for parent in PurePosixPath(inside).parents} - {"/"}):
        arguments += ["--perms", "0755", "--dir", folder]
    for inside, outside in mounts.items():
        if os.path.islink(outside):
            arguments += ["--symlink", os.readlink(outside), inside]
        else:
            arguments += ["--ro-bind", outside, inside]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    arguments += _memory_folder("/dev/shm", SHARED_MEMORY_BYTES)
    arguments += _memory_folder(FOLDER, confinement.limits.folder_bytes)
    if confinement.links_tmp:
        arguments += ["--symlink", FOLDER, "/tmp"]
    arguments += ["--remount-ro", "/", "--chdir", FOLDER]
    if (descriptor := filter_descriptor()) is not None:
        arguments += ["--seccomp", str(descriptor)]
    arguments.append("--")
    return ["bwrap", *arguments, *_changed_user(confinement), *command]


def _memory_folder(path: str, size: int) -> list[str]:
    return ["--perms", "1777", "--size", str(size), "--tmpfs", path]


def _changed_user(confinement: Confinement) -> list[str]:
    """Return the prefix that limits the number of processes, of an own user where this one is root."""
    prefix = [_tool("prlimit"), f"--nproc={confinement.limits.processes}:{confinement.limits.processes}", "--"]
    if confinement.is_root:
        user = str(confinement.user)
        prefix += [_tool("setpriv"), f"--reuid={user}", f"--regid={user}", "--clear-groups", "--inh-caps=-all"]
        prefix += ["--bounding-set=-all", "--no-new-privs", "--"]
    return prefix


def _tool(name: str) -> str:
    return shutil.which(name, path=os.defpath + ":/usr/sbin:/sbin") or name
