"""`python docs/package_table.py` writes the table of packages in architecture.md from the packages' docstrings."""

from __future__ import annotations

import ast
import re
from pathlib import Path

DOCS = Path(__file__).parent
PAGE = DOCS / "architecture.md"
PACKAGES = DOCS.parent / "craton"
ORDER = [  # of the layers, as the import contract in pyproject.toml has them
    *("cli", "api", "bench", "observability", "orchestration", "frameworks", "ml", "agent", "planning"),
    *("infrastructure", "job", "telemetry", "html_report", "http_guard"),
]
FRAME = re.compile(r"(<!-- packages: made by docs/package_table\.py -->\n).*?(<!-- end -->)", re.DOTALL)


def table() -> str:
    """A row for each package, those below it indented: its name, the first line of its docstring, its files."""
    rows = ["| package | what it is and guarantees | files |", "|---|---|--:|"]
    for layer in ORDER:
        for face in sorted((PACKAGES / layer).rglob("__init__.py"), key=lambda path: path.parent.parts):
            parts = face.parent.relative_to(PACKAGES).parts
            name = f"**`{layer}`**" if len(parts) == 1 else "&emsp;" * (len(parts) - 1) + f"`{parts[-1]}`"
            purpose = (ast.get_docstring(ast.parse(face.read_text(encoding="utf-8"))) or "").partition("\n")[0]
            rows.append(f"| {name} | {purpose} | {len(list(face.parent.glob('*.py')))} |")
    return "\n".join(rows) + "\n"


def updated(page: str) -> str:
    """The text of the page with the table as it is now."""
    assert FRAME.search(page), f"{PAGE.name} has no place for the table"
    return FRAME.sub(lambda match: match[1] + table() + match[2], page)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
