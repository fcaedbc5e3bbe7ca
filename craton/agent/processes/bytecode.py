"""Where the processes of a run keep compiled bytecode if their packages have none.

Container images often set PYTHONDONTWRITEBYTECODE and install packages without bytecode. Every process then compiles
torch's sources again, which takes seconds at each start.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile

from craton.infrastructure.storage import cache_root


def bytecode_environment(environment: Mapping[str, str], package: str = "torch") -> dict[str, str]:
    """Return the variables with which a process keeps its bytecode in the cache folder; none if the package has
    bytecode, if the environment already says where to keep it, or if the folder cannot be written."""
    spec = find_spec(package)
    if "PYTHONPYCACHEPREFIX" in environment or spec is None or spec.cached is None or Path(spec.cached).exists():
        return {}
    folder = cache_root(environment) / "bytecode"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder):
            pass
    except OSError:  # Python would ignore installed bytecode and keep none
        return {}
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder)}
