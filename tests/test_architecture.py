"""The rules of the architecture, checked on the syntax trees of all modules, including imports inside functions."""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from data import layouts, listing, pairing
from data.findings import KINDS
from data.folders import Folders
from data.formats.table import FORMATS
from data.formats.voc import VOC
from data.spec import FilesSplit
from engine.report.advice import ADVICE
from engine.run import folder
from engine.train import trackers
from tests.helpers.repository import ROOT
from tests.helpers.requirements import requirements
from utils.config.commands import COMMANDS
from utils.config.export_formats import EXPORT_FORMATS
from utils.config.settings import HYPERPARAMETERS
from utils.distributed import agreement
from utils.machine.packages import DISTRIBUTION_NAMES

LAYERS = ("utils", "data", "models", "engine", "tools")
SCRIPTS = tuple(sorted(path.stem for path in ROOT.glob("*.py")))
ALLOWED = {
    "utils": {"utils"},
    "data": {"data", "utils"},
    "models": {"models", "utils"},
    "engine": {"utils", "data", "models", "engine"},
    "tools": set(LAYERS),
}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for layer in LAYERS
    for path in (ROOT / layer).rglob("*.py")
}
# `python -m PACKAGE` runs its __main__.py, which nobody needs to import.
MAINS = {name for name in MODULES if name.endswith(".__main__")}
API = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "lockstep").glob("*.py")}
LAUNCHERS = {f"launch.{path.stem}": path for path in (ROOT / "launch").glob("*.py")}
SOURCES = {**MODULES, **API, **LAUNCHERS, **{name: ROOT / f"{name}.py" for name in SCRIPTS}}
# Modules that may import the packages of an extra, besides those of every installation.
OF_EXTRA = {
    "convert": ("tools.convert",),
    "export": ("engine.export",),
    "litert": ("engine.export",),
    "ncnn": ("engine.export",),
    "ray": ("launch",),
    "search": ("tools.search",),
    "tiff": ("data.images.tiff",),
    "track": ("engine.inference.tracks",),
    "trackers": ("engine.train.trackers",),
}
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}


def imports_of(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Yields dotted names that statements import, with their lines."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield (full if full in SOURCES else base), node.lineno


@cache
def imports() -> dict[str, list[tuple[str, int]]]:
    return {name: list(imports_of(ast.walk(tree))) for name, tree in trees().items()}


def test_imports_respect_the_layers():
    def is_wrong(layer: str, imported: str) -> bool:
        top = imported.split(".")[0]
        is_upward = top in LAYERS and top not in ALLOWED[layer]
        return not top or top in SCRIPTS or top == "lockstep" or imported in MAINS or is_upward

    wrong = [
        f"{name}:{line} imports {imported}"
        for name in MODULES
        for imported, line in imports()[name]
        if is_wrong(name.split(".")[0], imported)
    ]
    assert not wrong


def stack_of(layer: str) -> list[set[str]]:
    """Returns the packages of a folder by level, the lowest first, as docs/architecture.md draws them."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (line,) = re.findall(rf"^ *{layer}: +(.+)$", text, re.MULTILINE)
    return [set(level.split()) for level in line.split("<")]


@pytest.mark.parametrize("layer", LAYERS)
def test_packages_form_a_stack(layer: str):
    """A package only imports packages below it."""
    stack = stack_of(layer)
    level = {package: number for number, packages in enumerate(stack) for package in packages}
    assert len(level) == sum(map(len, stack)), "a package is drawn twice"
    names = [name for name in MODULES if name.startswith(f"{layer}.")]
    assert set(level) == {name.split(".")[1] for name in names} - {"__init__"}
    wrong = []
    for name in names:
        for imported, line in imports()[name]:
            if imported.startswith(f"{layer}."):
                importing = name.split(".")[1]
                other = imported.split(".")[1]
                if importing != other and level[other] >= level[importing]:
                    wrong.append(f"{name}:{line}: {importing} may not import {other}")
    assert not wrong


def test_no_import_cycle():
    graph = {name: {i for i, _ in imports()[name] if i in SOURCES and i != name} for name in SOURCES}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join([*trail, name])}"
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_packages_beside_each_other_import_in_one_direction():
    """At every depth. A package and the folder that it lies in may import each other."""
    pairs: set[tuple[str, str]] = set()
    for name in MODULES:
        for imported in {imported for imported, _ in imports()[name] if imported in MODULES}:
            importing_parts = name.split(".")[:-1]
            imported_parts = imported.split(".")[:-1]
            shared = itertools.takewhile(lambda parts: parts[0] == parts[1], zip(importing_parts, imported_parts))
            depth = len(list(shared)) + 1
            if depth <= min(len(importing_parts), len(imported_parts)):
                pairs.add((".".join(importing_parts[:depth]), ".".join(imported_parts[:depth])))
    assert ("data.cache", "data.images") in pairs
    assert not [pair for pair in pairs if pair[::-1] in pairs]


def test_no_test_file_is_imported():
    """What several test files use is in a module of its own. Fixtures of a file do not apply where it is imported."""
    imported = [
        f"{path.relative_to(ROOT)}: {module}"
        for folder in ("tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        for module in re.findall(r"^ *from ([\w.]+) import", path.read_text(encoding="utf-8"), re.MULTILINE)
        if module.rpartition(".")[2].startswith("test_")
    ]
    assert not imported


def test_no_module_uses_eval_or_exec():
    found = [
        f"{name}:{node.lineno}: {node.func.id}"
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in ("eval", "exec", "__import__")
    ]
    assert not found


def test_rank_variables_are_read_in_one_place():
    used = {
        name: set(re.findall(rf"[\"']({'|'.join(RANK_VARIABLES)})[\"']", path.read_text(encoding="utf-8")))
        for name, path in SOURCES.items()
        if name != "utils.process.launch" and name not in LAUNCHERS  # which set them
    }
    assert not {name: variables for name, variables in used.items() if variables}


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def test_package_init_only_re_exports():
    wrong = [
        f"{name}:{node.lineno}"
        for name in MODULES
        if name.endswith(".__init__")
        for node in trees()[name].body
        if not is_docstring(node) and not isinstance(node, ast.ImportFrom)
    ]
    assert not wrong


def test_import_only_defines():
    """Top-level statements are imports, definitions, constants and docstrings: no bare calls, loops or try blocks."""
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)

    def runs(node: ast.stmt) -> bool:
        tests = ("__name__ == '__main__'", "TYPE_CHECKING")
        is_main = isinstance(node, ast.If) and ast.unparse(node.test) in tests
        return not isinstance(node, allowed) and not is_docstring(node) and not is_main

    wrong = [f"{name}:{node.lineno}" for name in (*MODULES, *API) for node in trees()[name].body if runs(node)]
    assert not wrong


def test_every_imported_package_is_required():
    """The installation requires it, or the extra that the importing module belongs to."""
    product = {*LAYERS, *SCRIPTS, "lockstep", "launch", "_typeshed"}  # the last for type checkers only
    needed = requirements()
    wrong = []
    del needed["dev"]
    del needed["clients"]
    places = [(places, {*needed[extra]}) for extra, places in OF_EXTRA.items()]
    assert {*needed} == {"", *OF_EXTRA}
    assert all(any(name.startswith(prefix) for name in SOURCES) for prefixes, _ in places for prefix in prefixes)
    for name, found in imports().items():
        allowed = {*needed[""]}.union(*(packages for prefixes, packages in places if name.startswith(prefixes)))
        for imported, line in found:
            top = imported.partition(".")[0]
            package = {"mlflow": "mlflow-skinny", **DISTRIBUTION_NAMES}.get(top, top).lower()
            if top not in product | sys.stdlib_module_names and package not in allowed:
                wrong.append(f"{name}:{line} imports {top}, which nothing requires")
    assert not wrong


def test_every_folder_of_the_code_is_compared_between_the_processes_of_a_run():
    """Those that a training imports, and the scripts of the installed package."""
    assert {*agreement.CODE_FOLDERS} == {*LAYERS} - {"tools"} | {"scripts"}


def settings(_: Path) -> int:
    return len({field.name for command in COMMANDS.values() for field in fields(command.settings)} | {*HYPERPARAMETERS})


def files_of_a_run(_: Path) -> int:
    return len({*folder._FILES_OF_RUN, *trackers.FILES}) + len(folder._NUMBERED_FILES.pattern.split("|"))


def names_of_layouts(_: Path) -> int:
    return len((*listing.IMAGE_FOLDERS, layouts.LABEL_FOLDER, *layouts.NAME_LISTS, *layouts.FILE_NAMES))


def places_of_labels(root: Path) -> int:
    """Those of a folder without a YAML, of YOLO's label files, and below a folder that a YAML names."""
    images = root / "export" / "train" / "images"
    labels = root / "annotations"
    inside = [images / "a", labels / "a", labels / "train" / "images" / "a"]
    for path in (*inside, *(above / layouts.LABEL_FOLDER / "train" for above in (root, root / "export"))):
        path.mkdir(parents=True, exist_ok=True)
    folders = Folders(root, is_bounded=True)
    of_folder = layouts._places(images, folders)
    of_yolo = pairing._yolo_places(str(images), folders)
    named = pairing._named_places(str(images / "a"), FilesSplit((root / "export",), labels, VOC), folders)
    return len(of_folder) + len(of_yolo) + len(named)


def loaded_by(*names: str) -> int:
    """Counts the files of this repository that importing these modules loads, by the imports at the top of each."""
    loaded: set[str] = set()
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        if name not in loaded:
            loaded.add(name)
            waiting += [imported for imported, _ in imports_of(trees()[name].body) if imported in SOURCES]
    return len(loaded)


@pytest.mark.parametrize(
    ("ceiling", "count", "sentence"),
    [
        (140, settings, "The commands share these settings and hyper-parameters."),
        (12, lambda _: len(KINDS), "A finding is of one of these kinds."),
        (5, lambda _: len(ADVICE), "A report has at most these rows of advice."),
        (12, names_of_layouts, "`--data FOLDER` knows layouts by these names of folders and files."),
        (12, places_of_labels, "The labels of an image may be in these places."),
        (7, lambda _: len(FORMATS), "Labels are read in these formats."),
        (6, lambda _: len(EXPORT_FORMATS), "export.py writes these formats."),
        (13, files_of_a_run, "A run writes these files, which a new run removes or a tracker stores."),
        (68, lambda _: loaded_by("engine.train.loop"), "The training loop loads these files."),
        (151, lambda _: loaded_by("val", "engine.commands.val"), "val.py loads these files to validate."),
    ],
)
def test_the_surface_does_not_grow(ceiling: int, count: Callable[[Path], int], sentence: str, tmp_path: Path):
    """What a user or reader has to know is counted; lines, tokens, modules and messages are not.

    Whoever raises a ceiling lowers another one in the same change, or names in its commit a public data set, program or
    report that needs what is new. Whoever takes something out lowers the ceiling.
    """
    assert count(tmp_path) <= ceiling, sentence
