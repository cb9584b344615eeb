"""Environments with packages that the tested one does not have."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import pytest


def environment_with(folder: Path, requirements: Iterable[str]) -> Path:
    """Creates an environment with the packages of this one, and with ``requirements``.

    Returns its interpreter. Skips the test where pip cannot install them.
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    Path(packages, "shared.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    command = [str(python), "-m", "pip", "install", "--quiet", *requirements]
    installed = subprocess.run(command, capture_output=True, text=True, check=False)
    if installed.returncode != 0:
        pytest.skip(f"cannot install {', '.join(requirements)}: {installed.stderr[-300:]}")
    return python
