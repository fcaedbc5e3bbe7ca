"""Optional packages: what is missing is named with the install command that fits the installation."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable
from importlib.metadata import Distribution, PackageNotFoundError, packages_distributions
from pathlib import Path

import pytest

from craton import extras
from craton.extras import MODULES, MissingExtraError, install_command, require_extra, require_package

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


Install = Callable[[Distribution | None], None]


class Installed(Distribution):
    """An installation whose records are given."""

    def __init__(self, origin: object = None, installer: str = "pip") -> None:
        self._files = {"INSTALLER": f"{installer}\n", "METADATA": METADATA}
        if origin is not None:
            self._files["direct_url.json"] = json.dumps(origin)

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path("site-packages") / path


METADATA = """\
Metadata-Version: 2.4
Name: craton
Version: 0.1.0
Requires-Dist: numpy>=1.26
Provides-Extra: train
Requires-Dist: torch>=2.11; extra == 'train'
Requires-Dist: tokenizers>=0.20; extra == "train"
Provides-Extra: serve
Requires-Dist: craton[train]; extra == 'serve'
Requires-Dist: fastapi>=0.115; extra == 'serve'
"""


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def use(installed: Distribution | None) -> None:
        def found(name: str) -> Distribution:
            if installed is None:
                raise PackageNotFoundError(name)
            return installed

        monkeypatch.setattr(extras, "distribution", found)
        monkeypatch.setattr(extras, "_installer", lambda: "pip install")

    return use


def test_the_modules_are_those_of_the_project() -> None:
    """Every requirement of an extra provides a module that is checked for, and nothing else is.

    One that is not installed is taken to provide a module of its own name.
    """
    provided: dict[str, set[str]] = {}
    for module, names in packages_distributions().items():
        for name in names:
            provided.setdefault(name.lower().replace("_", "-"), set()).add(module)
    for extra, modules in MODULES.items():
        requirements = [re.split(r"[\[<>=;]", line)[0] for line in PROJECT["optional-dependencies"][extra]]
        own = set(modules) if "craton" not in requirements else set(modules) - set(MODULES["train"])
        for name in set(requirements) - {"craton"}:
            found = own & provided.get(name.lower(), {name.lower().replace("-", "_")})
            assert len(found) == 1, f"{extra}: {name}"
            own -= found
        assert not own, f"{extra}: {own} is in no requirement"


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        pytest.param(
            {"url": "https://example.org/c.git", "vcs_info": {"vcs": "git", "commit_id": "abc123"}},
            "pip install 'craton[train] @ git+https://example.org/c.git@abc123'",
            id="git",
        ),
        pytest.param(
            {"url": "https://example.org/craton-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'craton[train] @ https://example.org/craton-0.1.0-py3-none-any.whl'",
            id="url",
        ),
        # The next three are the examples of the specification of direct_url.json (PEP 610), with our name for pip's.
        pytest.param(
            {"url": "https://github.com/pypa/pip/archive/1.3.1.zip", "archive_info": {"hash": "sha256=2dc6b5a4"}},
            "pip install 'craton[train] @ https://github.com/pypa/pip/archive/1.3.1.zip'",
            id="PEP 610: archive",
        ),
        pytest.param(
            {
                "url": "https://github.com/pypa/pip.git",
                "vcs_info": {"vcs": "git", "requested_revision": "1.3.1", "commit_id": "7921be15"},
            },
            "pip install 'craton[train] @ git+https://github.com/pypa/pip.git@7921be15'",
            id="PEP 610: git",
        ),
        pytest.param(
            {
                "url": "https://github.com/user/repo.git",
                "subdirectory": "pip",
                "vcs_info": {"vcs": "git", "commit_id": "7921be15"},
            },
            "pip install 'craton[train] @ git+https://github.com/user/repo.git@7921be15#subdirectory=pip'",
            id="PEP 610: subdirectory",
        ),
        pytest.param(None, "pip install 'torch>=2.11' 'tokenizers>=0.20'", id="index"),
        pytest.param(
            {"url": "file:///gone/craton-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'torch>=2.11' 'tokenizers>=0.20'",
            id="a wheel that is gone",
        ),
    ],
)
def test_the_command_fits_the_installation(origin: object, expected: str, install: Install) -> None:
    install(Installed(origin))
    assert install_command("train") == expected


def test_a_clone_and_a_wheel_are_installed_again_with_the_extra(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my clone"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    url = folder.as_uri()
    install(Installed({"url": url, "dir_info": {"editable": True}}))
    assert install_command("train") == f"pip install -e '{folder}[train]'"
    install(Installed({"url": url, "dir_info": {}}))
    assert install_command("train") == f"pip install '{folder}[train]'"
    monkeypatch.chdir(folder)
    assert install_command("train") == "pip install '.[train]'"
    wheel = tmp_path / "craton-0.1.0-py3-none-any.whl"
    wheel.touch()
    install(Installed({"url": wheel.as_uri(), "archive_info": {}}))
    assert install_command("serve") == f"pip install '{wheel}[serve]'"


def test_an_extra_within_an_extra_is_listed(install: Install) -> None:
    install(Installed())
    assert install_command("serve") == "pip install 'torch>=2.11' 'tokenizers>=0.20' 'fastapi>=0.115'"


def test_a_tree_that_is_not_installed_is_a_clone(install: Install) -> None:
    install(None)
    assert install_command("train").endswith("[train]'")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require_extra("train", "`craton run`", ("json", "re"))
    monkeypatch.setattr(extras, "install_command", lambda extra: f"INSTALL {extra}")
    with pytest.raises(MissingExtraError) as caught:
        require_extra("train", "`craton run`", ("json", "no_such_module", "nor_this.one"))
    assert str(caught.value) == (
        "`craton run` needs no_such_module and nor_this.one, which are not installed; run: INSTALL train"
    )
    with pytest.raises(
        MissingExtraError, match=r"needs no_such_module, which is not installed; run: .* no_such_module$"
    ):
        require_package("no_such_module", "--fsx")


def test_no_text_installs_the_name_from_an_index() -> None:
    """`pip install craton[...]` would install whatever carries the name on a package index."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*")]
    sources = [*(ROOT / "craton").rglob("*.py"), *(ROOT / "craton").rglob("*.toml"), ROOT / "Makefile"]
    hint = re.compile(r"""(pip|uv|pipx)3? (install|inject)( -\S+)* ["'`]?craton(\[|["'`\s]|$)""")
    found = [
        f"{path.name}: {line.strip()}"
        for path in (*pages, *sources)
        if path.suffix in (".md", ".py", ".toml", ".yaml", "")
        if path.is_file()
        for line in path.read_text(encoding="utf-8").splitlines()
        if hint.search(line)
    ]
    assert not found
