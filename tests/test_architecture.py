"""The rules of the architecture, checked on the syntax trees of all modules, including imports inside functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("utils", "data", "models", "engine")
SCRIPTS = tuple(sorted(path.stem for path in ROOT.glob("*.py")))
ALLOWED = {"utils": {"utils"}, "data": {"data", "utils"}, "models": {"models", "utils"}, "engine": set(LAYERS)}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for layer in LAYERS
    for path in (ROOT / layer).rglob("*.py")
}
# `python -m PACKAGE` runs its __main__.py, which nobody needs to import.
MAINS = {name for name in MODULES if name.endswith(".__main__")}
API = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "lockstep").glob("*.py")}
SOURCES = {**MODULES, **API, **{name: ROOT / f"{name}.py" for name in SCRIPTS}}
MOST_MODULES = 8  # of a folder
FOLDERS_TO_SHRINK = {"data": 1, "engine/train": 1}
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}


def tree_of(name: str) -> ast.Module:
    return ast.parse(SOURCES[name].read_text(encoding="utf-8"))


def imports_of(name: str) -> Iterator[tuple[str, int]]:
    """Dotted names that a module imports anywhere, with their lines."""
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: relative import"
            base = node.module or ""
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield (full if full in SOURCES else base), node.lineno


def test_the_tests_see_all_modules():
    assert {"train", "val", "detect"} <= set(SCRIPTS)
    assert {"utils.structures", "data.dataset", "models.detector", "engine.train.trainer"} <= set(MODULES)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_respect_the_layers(name: str):
    layer = name.split(".")[0]
    for imported, line in imports_of(name):
        top = imported.split(".")[0]
        assert top not in SCRIPTS, f"{name}:{line} imports the script {top}"
        assert top != "lockstep", f"{name}:{line} imports {imported}"
        assert imported not in MAINS, f"{name}:{line} imports the script {imported}"
        if top in LAYERS:
            assert top in ALLOWED[layer], f"{name}:{line}: {layer} may not import {top}"


def stack_of(layer: str) -> list[set[str]]:
    """The packages of a folder by level, the lowest first, as docs/architecture.md draws them."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (line,) = re.findall(rf"^ *{layer}: +(.+)$", text, re.MULTILINE)
    return [set(level.split()) for level in line.split("<")]


@pytest.mark.parametrize("layer", LAYERS)
def test_packages_form_a_stack(layer: str):
    """A package only imports packages below it."""
    stack = stack_of(layer)
    level = {package: number for number, packages in enumerate(stack) for package in packages}
    assert len(level) == sum(map(len, stack)), "a package is drawn twice"
    assert set(level) == {name.split(".")[1] for name in MODULES if name.startswith(f"{layer}.")} - {"__init__"}
    for name in (name for name in MODULES if name.startswith(f"{layer}.")):
        for imported, line in imports_of(name):
            if imported.startswith(f"{layer}."):
                own, other = name.split(".")[1], imported.split(".")[1]
                assert own == other or level[other] < level[own], f"{name}:{line}: {own} may not import {other}"


@pytest.mark.parametrize("layer", LAYERS)
def test_no_folder_is_a_long_list(layer: str):
    for folder in [ROOT / layer, *(path for path in (ROOT / layer).rglob("*") if path.is_dir())]:
        modules = [path.name for path in folder.glob("*.py") if not path.name.startswith("__")]
        allowed = MOST_MODULES + FOLDERS_TO_SHRINK.get(folder.relative_to(ROOT).as_posix(), 0)
        assert len(modules) <= allowed, f"{folder}: {len(modules)} modules: {', '.join(sorted(modules))}"


def test_no_import_cycle():
    graph = {name: {i for i, _ in imports_of(name) if i in SOURCES and i != name} for name in SOURCES}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join([*trail, name])}"
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_no_module_uses_eval_or_exec(name: str):
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec", "__import__"), f"{name}:{node.lineno}: {node.func.id}"


@pytest.mark.parametrize("name", sorted(set(SOURCES) - {"utils.distributed.launch"}))
def test_rank_variables_are_read_in_one_place(name: str):
    text = SOURCES[name].read_text(encoding="utf-8")
    used = {variable for variable in RANK_VARIABLES if re.search(rf"[\"']{variable}[\"']", text)}
    assert not used, f"{name} names {used}"


@pytest.mark.parametrize("layer", LAYERS)
def test_package_init_only_re_exports(layer: str):
    for path in (ROOT / layer).rglob("__init__.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            assert is_docstring or isinstance(node, ast.ImportFrom), f"{path}:{node.lineno}: does more than re-export"


@pytest.mark.parametrize("name", sorted({**MODULES, **API}))
def test_import_only_defines(name: str):
    """Top-level statements are imports, definitions, constants and docstrings: no bare calls, loops or try blocks."""
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for node in tree_of(name).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_main = isinstance(node, ast.If) and ast.unparse(node.test) in (
            "__name__ == '__main__'",
            "TYPE_CHECKING",
        )
        assert isinstance(node, allowed) or is_docstring or is_main, f"{name}:{node.lineno}: runs at import"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_modules_are_named_for_a_concept(name: str):
    assert name.split(".")[-1] not in ("misc", "general", "common", "helpers")
