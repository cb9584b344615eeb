"""The additions of docs/extending.md work: they are applied to a copy of the code, and the copy is tested."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.documents import ROOT, Block, blocks
from tests.helpers.preloaded import python

PAGE = "docs/extending.md"
NEW_FILES = [block for block in blocks(PAGE) if block.language == "python"]
CHANGES = [block for block in blocks(PAGE) if block.language == "diff"]
CODE = ("utils", "data", "models", "engine", "lockstep", "configs")
COPIED = (*CODE, "tests/helpers", "tests/__init__.py", "tests/conftest.py")
# Tests of the additions, and a test of the whole code that fails if an addition lacks a file.
CHECKS = ("tests/docs/extension_checks.py", "tests/utils/config/test_recipes.py")


def changed(text: str, change: Block) -> str:
    """Returns ``text`` with the changes of a block, which are separated by ``@@``.

    Lines begin with a space (they are there), ``-`` (they are replaced) or ``+``. Raises AssertionError unless each is
    at exactly one place.
    """
    lines = text.splitlines()
    for hunk in change.text.split("@@\n"):
        rows = hunk.splitlines()
        assert all(row[:1] in (" ", "-", "+", "") for row in rows), change
        before = [row[1:] for row in rows if row[:1] in (" ", "-", "")]
        after = [row[1:] for row in rows if row[:1] in (" ", "+", "")]
        places = [i for i in range(len(lines)) if lines[i : i + len(before)] == before]
        assert len(places) == 1, f"{change}: {change.title} has {len(places)} places with\n{hunk}"
        lines[places[0] : places[0] + len(before)] = after
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the code with all additions."""
    copy = tmp_path_factory.mktemp("extended")
    for name in (*COPIED, *(path.name for path in ROOT.glob("*.py")), *CHECKS):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name)  # with its bytecode, so that most of it need not be compiled
        else:
            shutil.copy(ROOT / name, copy / name)
    for folder in ("tests/docs", "tests/utils", "tests/utils/config"):
        (copy / folder / "__init__.py").touch()
    for block in NEW_FILES:
        assert not (copy / block.title).exists(), block
        (copy / block.title).write_text(block.text, encoding="utf-8")
    for block in CHANGES:
        path = copy / block.title
        path.write_text(changed(path.read_text(encoding="utf-8"), block), encoding="utf-8")
    return copy


@pytest.mark.parametrize("marker", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_additions_work(extended: Path, marker: str):
    environment = {**os.environ, "PYTHONPATH": str(extended)}
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(extended), "-m", marker]
    command = [python(), "-m", "pytest", *options, *CHECKS]
    done = subprocess.run(command, cwd=extended, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


@pytest.mark.slow
def test_the_types_of_the_code_are_proven(extended: Path):
    shutil.copy(ROOT / "pyproject.toml", extended / "pyproject.toml")
    files = [block.title for block in NEW_FILES]
    done = subprocess.run([sys.executable, "-m", "mypy", *files], cwd=extended, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
