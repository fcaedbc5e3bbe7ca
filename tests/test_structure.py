"""The structure of the code: small faces, one definition of a class name, imports through faces, short folders.

Names are read from the source with `ast`, as type checkers and import-linter read it, and compared with run time.
"""

from __future__ import annotations

import ast
import re
import runpy
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from craton.lazy import face_names

ROOT = Path(__file__).parents[1]
MAX_NAMES = 32  # on a face
MAX_FILES = 22  # .py files in one folder
LAZY_LINE = "__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)"
CHECKING = "if TYPE_CHECKING:\n"
MORE_LINES = {"craton": ["__version__ = VERSION"], "craton.cli": ["__all__ = ['main']"]}

# Modules that are used as namespaces outside their folder (`reference.swiglu`), with the reason.
NAMESPACES = {
    "craton.ml.kernels.reference": "plain PyTorch twins that share the names of the fused kernels",
    "craton.ml.kernels.triton.adapters": "kernels that share names with their plain twins",
    "craton.ml.kernels.triton.choose": "kernels that share names with their plain twins",
    "craton.ml.kernels.triton.choose_kept": "kernels that share names with their plain twins",
    "craton.ml.kernels.triton.norm": "kernels that share names with their plain twins",
    "craton.ml.kernels.triton.paged_decode": "kernels that share names with their plain twins",
    "craton.ml.kernels.triton.paged_prefill": "kernels that share names with their plain twins",
    "craton.ml.kernels.triton.paged_store": "kernels that share names with their plain twins",
    "craton.ml.kernels.triton.int4": "kernels that share names with their plain twins",
    "craton.ml.kernels.triton.skinny": "kernels that share names with their plain twins",
    "craton.ml.kernels.triton.swiglu": "kernels that share names with their plain twins",
    "craton.ml.models.dispatch": "the trace replaces a function in it",
    "craton.ml.training.build": "the trace replaces functions in it",
    "craton.ml.training.evaluate": "its function has its name",
    "craton.ml.training.loop": "the trace replaces a class in it",
    "craton.ml.training.session": "the fork server calls the program's own entry point",
}

# What starts and changes runs, and what the command line may take from there.
CHANGES = ("craton.orchestration.start", "craton.orchestration.changes")
LOOKS = {
    "RunStart",
    "SavedStep",
    "find_rescue",
    "fired_faults",
    "first_copy",
    "newest_checkpoint",
    "sharing_doubt",
    "what_happens",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((ROOT / "craton").rglob("*.py"))}
FACES = [name for name, path in MODULES.items() if path.name == "__init__.py"]


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def trees() -> dict[str, ast.Module]:
    return {name: tree_of(name) for name in MODULES}


def face_faults(name: str, tree: ast.Module) -> list[str]:
    """Statements that a face may not hold: all but its docstring, imports and the line that loads its names."""
    allowed = {LAZY_LINE, *MORE_LINES.get(name, ())}
    lines: list[ast.stmt] = []
    for statement in tree.body[1:] if ast.get_docstring(tree) else tree.body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            lines += [*statement.body, *statement.orelse]
        else:
            lines.append(statement)
    others = [ast.unparse(line) for line in lines if not isinstance(line, ast.Import | ast.ImportFrom)]
    return [line for line in others if line not in allowed]


def test_a_face_is_small_and_holds_no_implementation() -> None:
    sizes = {name: len(face_names(MODULES[name].read_text(encoding="utf-8"))) for name in FACES}
    assert {name: size for name, size in sizes.items() if size > MAX_NAMES} == {}
    assert max(sizes.values()) > MAX_NAMES // 2, "names are counted"
    assert {name: faults for name in FACES if (faults := face_faults(name, tree_of(name)))} == {}
    assert face_faults("craton.job", ast.parse("'A face.'\nfrom typing import Any\nLIMIT = 3")) == ["LIMIT = 3"]


@pytest.mark.parametrize("name", [name for name in FACES if face_names(MODULES[name].read_text(encoding="utf-8"))])
def test_type_checkers_and_run_time_see_the_same_names(name: str) -> None:
    """A name that is also the name of a module of the folder would become that module once it is imported."""
    listed = face_names(MODULES[name].read_text(encoding="utf-8"))
    assert not {f"{name}.{export}" for export in listed} & set(MODULES)
    face = import_module(name)
    assert dir(face) == face.__all__ == sorted(listed)
    assert [export for export in listed if isinstance(getattr(face, export), ModuleType)] == []
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'; it has"):
        face.no_such_name  # noqa: B018


def test_a_public_class_name_has_one_definition() -> None:
    homes = defaultdict(list)
    for name, tree in trees().items():
        for statement in tree.body:
            if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_"):
                homes[statement.name].append(name)
    assert len(homes) > 500, "classes are found"
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def imports(tree: ast.Module) -> Iterator[str]:
    """The modules of Craton that a source imports, anywhere in it; a name of a face counts as the face."""
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names if alias.name in MODULES)
        elif isinstance(statement, ast.ImportFrom) and statement.module in MODULES:
            for alias in statement.names:
                inner = f"{statement.module}.{alias.name}"
                yield inner if inner in MODULES else statement.module


def may_import(name: str, imported: str) -> bool:
    """Faces are for all; a module is for its folder and the folders below it; the command line is one folder."""
    home = "craton.cli" if imported.startswith("craton.cli.") else imported.rpartition(".")[0]
    return imported in FACES or f"{name}.".startswith(f"{home}.")


def test_a_module_is_imported_from_outside_through_the_face_of_its_folder() -> None:
    around = {(name, home) for name, tree in trees().items() for home in imports(tree) if not may_import(name, home)}
    assert {pair for pair in around if pair[1] not in NAMESPACES} == set()
    assert {imported for _, imported in around} == set(NAMESPACES), "an exception that nothing needs is removed"
    planted = list(imports(ast.parse("def f():\n    from craton.telemetry.files.lines import read_lines")))
    assert not may_import("craton.planning.planner", *planted)
    assert may_import("craton.telemetry.files.storage", *planted)


def names_from(tree: ast.Module, modules: tuple[str, ...]) -> set[str]:
    """What a source imports from these modules, anywhere in it."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module in modules]
    return {alias.name for statement in found for alias in statement.names}


def test_the_command_line_starts_and_changes_runs_through_the_python_api() -> None:
    """Of what starts and changes runs it imports only types, and functions that look."""
    used: set[str] = set()
    for name, tree in trees().items():
        if name.startswith("craton.cli."):
            used |= names_from(tree, CHANGES)
    assert used == LOOKS, "and an exception that nothing needs is removed"
    verbs = ("run", "serve", "ps", "logs", "why", "stop", "rm", "resume", "resize", "chaos")
    assert [verb for verb in verbs if "craton.api" not in imports(tree_of(f"craton.cli.{verb}"))] == []
    planted = ast.parse("def f():\n    from craton.orchestration.start import stop_run")
    assert not names_from(planted, CHANGES) <= LOOKS


def test_a_folder_has_few_files() -> None:
    counts = {name: len(list(MODULES[name].parent.glob("*.py"))) for name in FACES}
    assert {name: count for name, count in counts.items() if count > MAX_FILES} == {}


def test_the_import_contracts_see_behind_faces(tmp_path: Path) -> None:
    """In a copy of the code: a name from a higher layer on a face, and two siblings that import each other's faces."""
    for path in MODULES.values():
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    face = tmp_path / "craton" / "telemetry" / "__init__.py"
    text = face.read_text(encoding="utf-8")
    face.write_text(text.replace(CHECKING, f"{CHECKING}    from craton.planning import Plan\n"), encoding="utf-8")
    with (tmp_path / "craton" / "planning" / "rates" / "kernels.py").open("a", encoding="utf-8") as file:
        file.write("\nfrom craton.planning.step import StepModel\n")
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    broken = re.findall(r"^(.+) BROKEN$", done.stdout, re.MULTILINE)
    assert "imports go down the layers only" in broken
    assert "packages and modules of one folder do not import each other in circles" in broken
    assert "craton.telemetry -> craton.planning" in done.stdout
    assert ".rates -> .step (1 import)" in done.stdout


def test_a_package_says_in_one_line_what_it_is() -> None:
    lines = {name: (ast.get_docstring(tree_of(name)) or "").partition("\n")[0] for name in FACES}
    assert {name: line for name, line in lines.items() if not line.endswith(".")} == {}


def test_the_table_of_packages_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "package_table.py"))
    page = script["PAGE"].read_text(encoding="utf-8")
    assert script["updated"](page) == page, "run `python docs/package_table.py`"
    assert script["table"]().count("\n") == 2 + len(FACES) - 1, "a row for each package but `craton` itself"
