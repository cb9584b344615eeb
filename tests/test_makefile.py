"""What the targets of the Makefile would run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def commands_of(target: str, folder: Path) -> str:
    """The commands that make would run for ``target`` in a folder with our Makefile."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    return subprocess.run(["make", "-n", target], cwd=folder, capture_output=True, text=True, check=True).stdout


def test_uv_is_installed_again_after_a_failed_download(tmp_path: Path):
    (tmp_path / ".venv-uv" / "bin").mkdir(parents=True)
    assert "pip install uv\n" in commands_of("lowest.txt", tmp_path)
    (tmp_path / ".venv-uv" / "bin" / "uv").touch()
    assert "pip install uv\n" not in commands_of("lowest.txt", tmp_path)
