"""Optional dependencies: check them before a verb does anything, and name the command that installs them.

The command fits the way Craton was installed (clone, wheel, Git URL, package index; pip or uv). It never asks a package
index for the name `craton`: what is published there under this name may be somebody else's.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any
from urllib.parse import unquote, urlsplit

from craton.errors import CratonError

# Extra → the modules that it provides; the requirements themselves are in pyproject.toml.
TRAIN = ("torch", "safetensors", "tokenizers", "transformers")
MODULES: dict[str, tuple[str, ...]] = {
    "train": TRAIN,
    "serve": (*TRAIN, "aiohttp", "fastapi", "httptools", "jinja2", "llguidance", "regex", "uvicorn", "uvloop"),
    "kubernetes": ("kr8s",),
    "observe": ("botocore", "grafana_foundation_sdk", "jinja2", "pynvml", "starlette", "uvicorn"),
    "parquet": ("pyarrow",),
    "s3": ("obstore",),
    "tensorboard": ("tensorboard",),
    "reasoning": ("reasoning_gym",),
    "verify": ("jsonschema", "latex2sympy2_extended", "math_verify", "sympy"),
}


class MissingExtraError(CratonError):
    """A package that this verb needs is not installed."""


def require_extra(extra: str, user: str, modules: Iterable[str] | None = None) -> None:
    """Raise MissingExtraError unless the modules of an extra are installed. `user`: the verb or key that needs them;
    `modules`: those that it needs [default: all of the extra]. Nothing is imported."""
    if missing := missing_modules(MODULES[extra] if modules is None else modules):
        raise MissingExtraError(missing_text(user, missing, install_command(extra)))


def require_package(package: str, user: str) -> None:
    """Raise MissingExtraError unless a package that belongs to no extra is installed."""
    if missing := missing_modules([package]):
        raise MissingExtraError(missing_text(user, missing, install_package_command(package)))


def missing_modules(modules: Iterable[str]) -> list[str]:
    return [module for module in modules if not _is_installed(module)]


def missing_text(user: str, missing: Iterable[str], command: str) -> str:
    names = list(missing)
    listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    return f"{user} needs {listed}, which {'is' if len(names) == 1 else 'are'} not installed; run: {command}"


def install_command(extra: str) -> str:
    """The shell command that adds an extra to this environment."""
    return f"{_installer()} {_requirement(extra)}"


def install_package_command(package: str) -> str:
    """The shell command that installs another project's package into this environment."""
    return f"{_installer()} {quote(package)}"


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a broken or half-loaded module of that name
        return False


def _installed() -> Distribution | None:
    try:
        return distribution("craton")
    except PackageNotFoundError:
        return None


def _installer() -> str:
    """pip, or uv where it made this environment, for the interpreter that runs now."""
    installed = _installed()
    if installed is not None and (installed.read_text("INSTALLER") or "").strip() == "uv" and shutil.which("uv"):
        return f"uv pip install --python {quote(sys.executable)}"
    pip = shutil.which("pip")
    if pip is not None and Path(pip).parent == Path(sys.executable).parent:
        return "pip install"
    return f"{quote(sys.executable)} -m pip install"


def _requirement(extra: str) -> str:
    installed = _installed()
    if installed is None:  # on the path without being installed: a clone
        return _of_folder(Path(__file__).parents[1], extra)
    origin = _origin(installed)
    url = str(origin.get("url", ""))
    if url.startswith("file:"):
        path = Path(unquote(urlsplit(url).path))
        if origin.get("dir_info") is not None and (path / "pyproject.toml").is_file():
            return ("-e " if origin["dir_info"].get("editable") else "") + _of_folder(path, extra)
        if origin.get("archive_info") is not None and path.is_file():
            return quote(f"{path}[{extra}]")
    elif url:
        version = origin.get("vcs_info")
        source = f"{version['vcs']}+{url}@{version['commit_id']}" if version else url
        folder = f"#subdirectory={origin['subdirectory']}" if origin.get("subdirectory") else ""
        return quote(f"craton[{extra}] @ {source}{folder}")
    return " ".join(quote(requirement) for requirement in _requirements(installed, extra))


def _origin(installed: Distribution) -> dict[str, Any]:
    """What an installer recorded about the source of a distribution (PEP 610); empty for a package index."""
    try:
        document = json.loads(installed.read_text("direct_url.json") or "{}")
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _of_folder(folder: Path, extra: str) -> str:
    return quote(f".[{extra}]" if folder == Path.cwd() else f"{folder}[{extra}]")


def _requirements(installed: Distribution, extra: str) -> list[str]:
    """The packages behind an extra, those of the extras that it includes among them."""
    found: list[str] = []
    for line in installed.requires or []:
        requirement, _, marker = line.partition(";")
        if f"extra == '{extra}'" not in marker.replace('"', "'"):
            continue
        name, bracket, rest = requirement.strip().partition("[")
        if name == "craton" and bracket:
            found += [inner for part in rest.rstrip("]").split(",") for inner in _requirements(installed, part.strip())]
        else:
            found.append(requirement.strip())
    return list(dict.fromkeys(found))
