"""Exec another program that dies with the agent: `python -I -S child.py AGENT_PID PROGRAM ARGUMENT...`

PR_SET_PDEATHSIG makes the kernel kill this process when its parent thread (the agent's main thread) ends for any
reason; the setting survives exec. It is set here, in the new process before exec, because running Python between fork
and exec in the agent, which has threads, could deadlock. A changed parent shows that the agent died before it was set.

Imports nothing of Craton: it must start in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(agent_pid: int, command: list[str]) -> int:
    if sys.platform == "linux":
        library = ctypes.CDLL(None, use_errno=True)
        if library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            print(f"craton agent: prctl failed, {os.strerror(ctypes.get_errno())}", file=sys.stderr)
            return 126
    if os.getppid() != agent_pid:
        return 126
    # Python ignores SIGPIPE and passes that on through exec; programs expect the default.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"craton agent: cannot start {command[0]!r}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
