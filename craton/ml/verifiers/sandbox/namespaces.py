"""The sandbox without bubblewrap: own user, pid, network, mount, ipc and host-name namespaces, then Landlock.

`confine` is called in a forked, single-threaded process and never returns. Of the three processes that result, the
first waits, the second is the init of the new pid namespace, and the third executes the command. The kernel kills
everything in a pid namespace when its init ends, also processes in other sessions.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import stat
from collections.abc import Callable, Sequence

from craton.ml.verifiers.sandbox import kernel
from craton.ml.verifiers.sandbox.confinement import ENVIRONMENT, FOLDER, SHARED_MEMORY_BYTES, Confinement
from craton.ml.verifiers.sandbox.landlock import landlock_version, restrict_files
from craton.ml.verifiers.sandbox.limits import set_limit
from craton.ml.verifiers.sandbox.seccomp import apply_filter

NEW_ROOT = "/tmp"  # where the new root is mounted, in the new mount namespace only
NOT_STARTED = 125  # exit status of a sandbox that could not be set up; the reason is on its standard error
DEVICES = ("null", "zero", "full", "random", "urandom")
ISOLATED = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS


def confine(command: Sequence[str], confinement: Confinement) -> None:
    """Execute a command confined, and exit with its status."""
    flags = ISOLATED if confinement.is_root else ISOLATED | kernel.CLONE_NEWUSER
    become_init(flags, lambda: _set_up_root(confinement), lambda: _execute(command, confinement))


def become_init(flags: int, prepare: Callable[[], None], body: Callable[[], None]) -> None:
    """Enter new namespaces, and run `body` in a child of the init of the pid namespace; exit with its status."""
    if flags & kernel.CLONE_NEWUSER:
        user, group = os.geteuid(), os.getegid()
        kernel.unshare(flags)
        _map_users(user, group)
    else:
        kernel.unshare(flags)
    alive, held = os.pipe()
    init = os.fork()
    if init:
        os.close(alive)
        _exit_like(init)
    os.close(held)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([alive], [], [], 0)[0]:  # the waiting process ended before the line above
        os._exit(125)
    os.close(alive)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # its memory is a copy of the parent's: not for the confined process
    _or_exit(prepare)
    child = os.fork()
    if child == 0:
        _or_exit(body)
        os._exit(0)
    _exit_like(child)


def _or_exit(action: Callable[[], None]) -> None:
    """Do something; where it fails, write the reason to standard error and exit."""
    try:
        action()
    except BaseException as error:  # noqa: BLE001 (a forked copy must never return into the caller's code)
        with contextlib.suppress(OSError):
            os.write(2, f"{error}\n".encode())
        os._exit(NOT_STARTED)


def _exit_like(child: int) -> None:
    """Reap everything until a child ends, and exit with its status: 128 + N for signal N."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _map_users(user: int, group: int) -> None:
    for path, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{path}", "w") as file:
            file.write(text)


def _set_up_root(confinement: Confinement) -> None:
    """Build a root file system of read-only mounts, and make it the only one."""
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    # A mount may lie below the folder over which the new root is mounted: hold all of them open before.
    mounts = confinement.mounts()
    devices = {f"/dev/{name}": f"/dev/{name}" for name in DEVICES}
    links = {inside: os.readlink(outside) for inside, outside in mounts.items() if os.path.islink(outside)}
    opened = {
        inside: os.open(outside, os.O_PATH) for inside, outside in {**mounts, **devices}.items() if inside not in links
    }
    _mount_memory(NEW_ROOT, confinement.limits.folder_bytes)
    for inside in mounts:
        target = NEW_ROOT + inside
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        if inside in links:
            os.symlink(links[inside], target)
        else:
            _bind(opened[inside], target, stat.S_ISDIR(os.fstat(opened[inside]).st_mode))
    for path in ("/proc", "/dev", "/dev/shm", FOLDER):
        os.makedirs(NEW_ROOT + path, mode=0o755, exist_ok=True)
    if confinement.links_tmp:
        os.symlink(FOLDER, f"{NEW_ROOT}/tmp")
    kernel.mount("proc", f"{NEW_ROOT}/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    for path in devices:
        _bind(opened[path], NEW_ROOT + path, is_folder=False, flags=0)
    _mount_memory(f"{NEW_ROOT}/dev/shm", SHARED_MEMORY_BYTES)
    _mount_memory(NEW_ROOT + FOLDER, confinement.limits.folder_bytes)
    for descriptor in opened.values():
        os.close(descriptor)
    os.chdir(NEW_ROOT)
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    kernel.mount("none", "/", "", kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID)


def _mount_memory(path: str, size: int) -> None:
    kernel.mount("tmpfs", path, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, f"size={size},nr_inodes=8192,mode=1777")


def _bind(descriptor: int, target: str, is_folder: bool, flags: int = kernel.MS_RDONLY | kernel.MS_NODEV) -> None:
    if is_folder:
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        with open(target, "w"):
            pass
    kernel.mount(f"/proc/self/fd/{descriptor}", target, "", kernel.MS_BIND | kernel.MS_REC)
    if flags:
        _remount(target, flags)


def _remount(target: str, flags: int) -> None:
    """Add flags to a mount. A user namespace may not clear those that the mount has, so they are read first."""
    information = os.statvfs(target)
    names = {os.ST_NOSUID: kernel.MS_NOSUID, os.ST_NODEV: kernel.MS_NODEV, os.ST_NOEXEC: kernel.MS_NOEXEC}
    kept = sum(flag for bit, flag in names.items() if information.f_flag & bit)
    kept |= information.f_flag & (os.ST_NOATIME | os.ST_NODIRATIME)  # the same bits as MS_NOATIME and MS_NODIRATIME
    if information.f_flag & os.ST_RELATIME:
        kept |= 1 << 21  # MS_RELATIME
    kernel.mount("none", target, "", kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_NOSUID | flags | kept)


def _execute(command: Sequence[str], confinement: Confinement) -> None:
    os.setsid()
    if confinement.is_root:
        os.setgroups([])
        os.setresgid(confinement.user, confinement.user, confinement.user)
        os.setresuid(confinement.user, confinement.user, confinement.user)
    else:
        kernel.drop_capabilities()
    kernel.forbid_new_privileges()
    set_limit(resource.RLIMIT_NPROC, confinement.limits.processes)
    os.chdir(FOLDER)
    if landlock_version():
        readable = [path for path in confinement.mounts() if os.path.exists(path)]
        # An import lists the folder above a package too; it holds nothing else.
        above = {os.path.dirname(path) for path in confinement.also_readable}
        restrict_files([*readable, *above, "/proc"], [FOLDER, "/dev"])
    apply_filter()
    os.execve(command[0], list(command), ENVIRONMENT)
