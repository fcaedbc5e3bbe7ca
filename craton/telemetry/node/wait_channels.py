"""Kernel functions in which a process sleeps (`wchan`, proc_pid_wchan(5)), by what it waits for."""

from __future__ import annotations

import re

# A file system or a disk; not the functions of epoll and poll.
WAITS_FOR_FILES = re.compile(
    r"nfs|rpc_wait|\bll_|cl_sync|ptlrpc|osc_|lustre|fuse|ceph|io_schedule|wait_on_page|folio_wait|xfs_|ext4_|jbd2|blk_|percpu_rwsem|sb_start"
)
WAITS_FOR_LOCK = re.compile(r"locks_lock|flock_lock|posix_lock|fcntl_setlk")  # of a file
# Memory that a cgroup or the machine does not have.
WAITS_FOR_MEMORY = re.compile(r"memcg|mem_cgroup|oom|reclaim|shrink_|swap|throttle_direct")
# What no other rank ends: a timer, a pipe or socket of the machine, a terminal, a child process.
_SLEEPS_ALONE = re.compile(
    r"nanosleep|pipe_read|pipe_write|pipe_wait|unix_stream|unix_wait|n_tty|^do_wait$|sigtimedwait|sigsuspend"
)
_ALONE_FOR = (("nanosleep", "a timer"), ("pipe", "a pipe"), ("unix", "a local socket"), ("n_tty", "a terminal"))
FROZEN = re.compile(r"refrigerator|freezer")  # by its cgroup


def sleeps_for(channel: str) -> str:
    """Return what a main thread sleeps for that no other rank ends, e.g. "a pipe"; "" if that is not known."""
    if WAITS_FOR_LOCK.search(channel):
        return "a lock on a file"
    if WAITS_FOR_FILES.search(channel):
        return "a file or a disk"
    if not _SLEEPS_ALONE.search(channel):
        return ""
    return next((words for part, words in _ALONE_FOR if part in channel), "a child process or a signal")
