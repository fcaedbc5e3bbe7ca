"""What a confined process may read: the interpreter, its libraries and those of the system. No home folder, no run
directory, no configuration beyond that of the dynamic loader."""

from __future__ import annotations

import os
import shutil
import sys
from functools import cache
from pathlib import Path

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
    """Return the folders of installed packages that this interpreter searches."""
    names = ("site-packages", "dist-packages")
    return [path for path in sys.path if Path(path).name in names and os.path.isdir(path)]


def own_package() -> str:
    """Return the folder of the package `craton`, which need not be an installed one."""
    return str(Path(__file__).resolve().parents[3])


def _executables() -> list[Path]:
    """Return the interpreter and every link that leads to it."""
    found = [Path(sys.executable)]
    while found[-1].is_symlink() and len(found) < 16:
        target = found[-1].readlink()
        found.append(target if target.is_absolute() else Path(os.path.normpath(found[-1].parent / target)))
    return found
