"""What a confined process may read: the interpreter, its libraries and those of the system. No home folder, no run
directory, no configuration beyond that of the dynamic loader."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from functools import cache
from pathlib import Path

from craton.ml.verifiers.errors import IsolationError

SYSTEM_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")
LOADER_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")
# Set limits and users inside the sandbox, for bubblewrap does neither; both belong to util-linux.
TOOLS = ("prlimit", "setpriv")


@cache
def readable_paths() -> tuple[str, ...]:
    """Return folders and files, parents before what is below them, each as it is named on this machine."""
    base = Path(sys.base_prefix)
    paths = [Path(path) for path in (*SYSTEM_LIBRARIES, *LOADER_FILES)]
    paths += [Path(found) for tool in TOOLS if (found := shutil.which(tool, path=os.defpath + ":/usr/sbin:/sbin"))]
    paths += [base / "lib", base / "lib64", *_executables()]
    if sys.prefix != sys.base_prefix:
        paths.append(Path(sys.prefix) / "pyvenv.cfg")
    paths += [Path(path) for path in package_folders()]
    existing = sorted({str(path) for path in paths if os.path.lexists(path)}, key=lambda path: (path.count("/"), path))
    kept: list[str] = []
    for path in existing:
        if not any(path.startswith(f"{folder}/") and not os.path.islink(folder) for folder in kept):
            kept.append(path)
    return tuple(kept)


def package_folders() -> list[str]:
    """Return the folders of installed packages that this interpreter searches: those of its own, and those on
    PYTHONPATH into which pip has installed."""
    names = ("site-packages", "dist-packages")
    return [
        path
        for path in sys.path
        if os.path.isdir(path) and (Path(path).name in names or any(Path(path).glob("*.dist-info")))
    ]


def own_package() -> str:
    """Return the folder of the package `craton`, which need not be an installed one. IsolationError where root is the
    only user who may read it, for confined processes are other users then."""
    package = Path(__file__).resolve().parents[3]
    if os.geteuid() == 0 and not package.stat().st_mode & stat.S_IROTH:
        raise IsolationError(
            f"only root may read {package}, and confined verifiers run as another user: call `chmod -R a+rX {package}`"
        )
    return str(package)


def _executables() -> list[Path]:
    """Return the interpreter and every link that leads to it."""
    found = [Path(sys.executable)]
    while found[-1].is_symlink() and len(found) < 16:
        target = found[-1].readlink()
        found.append(target if target.is_absolute() else Path(os.path.normpath(found[-1].parent / target)))
    return found
