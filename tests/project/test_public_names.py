"""Public names: the page that lists them, the page that says which they are, what guides use."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from support.public_names import public_names, value_of

import hcp

ROOT = Path(__file__).resolve().parents[2]
INTEGRATIONS = ROOT / "hcp/integrations"
SUPPORT = (ROOT / "docs/reference/support.md").read_text()
PUBLIC = set(re.findall(r"`(hcp\.integrations\.[\w.]+)`", SUPPORT))
PAGES = [
    path
    for folder in ("docs/guides", "docs/concepts", "examples")
    for path in sorted((ROOT / folder).rglob("*.*"))
    if path.suffix in (".md", ".py", ".ipynb")
]


def exported(path: Path) -> set[str]:
    """The names of a module's __all__, without importing its trainer."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def file_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def test_the_page_of_public_names_lists_each_once_and_no_other() -> None:
    named = public_names()
    assert len({*named}) == len(named)
    assert sorted(name[4:] for name in named if name.count(".") == 1) == sorted(hcp.__all__)
    assert [
        name for name in named if not callable(value_of(name)) and name != "hcp.COMM_TYPES"
    ] == []


@pytest.mark.parametrize("name", sorted(hcp._OLD))
def test_a_name_that_moved_into_its_module_is_found_with_a_warning(name: str) -> None:
    home = f"hcp.{hcp._OLD[name]}"
    assert home in public_names()
    with pytest.warns(DeprecationWarning, match=rf"hcp\.{name} is now {re.escape(home)}$"):
        assert getattr(hcp, name) is value_of(home)


def test_the_page_of_support_names_the_modules_of_trainers() -> None:
    modules = {
        f"hcp.integrations.{path.parent.name if path.stem == '__init__' else path.stem}"
        for path in (*INTEGRATIONS.glob("*.py"), *INTEGRATIONS.glob("*/__init__.py"))
        if exported(path)
    }
    assert modules == {module for module in PUBLIC if module.count(".") == 2}
    assert all(file_of(module).exists() for module in PUBLIC)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_guide_uses_public_names_only(page: Path) -> None:
    text = re.sub(r" # noqa.*", "", page.read_text())
    used = [
        (module, name.split()[0])
        for module, names in re.findall(
            r"from (hcp\.integrations[\w.]*) import (\([^)]*\)|[\w, ]+)", text
        )
        for name in names.strip("()").split(",")
        if name.strip()
    ]
    for module, alias in re.findall(r"from hcp\.integrations import (\w+) as (\w+)", text):
        used += [(f"hcp.integrations.{module}", n) for n in re.findall(rf"\b{alias}\.(\w+)", text)]
    private = [
        f"{module}.{name}"
        for module, name in used
        if f"{module}.{name}" not in PUBLIC
        and (module not in PUBLIC or name not in (exported(file_of(module)) or {name}))
    ]
    assert private == []
