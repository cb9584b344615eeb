"""Runs the entry scripts in this process, which saves a second of start-up each, or in separate processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.helpers.preloaded import python
from tests.helpers.processes import LAUNCHED
from tests.helpers.repository import ROOT
from tests.helpers.tiny import write_dataset, write_model
from utils.process.main import run_main

SMALL = ["--imgsz", "64", "--batch-size", "4", "--device", "cpu", "--workers", "0", "--amp", "off", "--noplots"]
PLAIN = ["--device", "cpu", "--workers", "0", "--noplots"]  # flags for val.py


def write_inputs(root: Path, **images: int) -> Path:
    """Writes what `training` names. ``images``: the numbers of images of `write_dataset`. Returns ``root``."""
    write_dataset(root / "set", **images)
    write_model(root / "tiny.yaml")
    return root


def training(root: Path, project: Path, *more: object) -> list[str]:
    """Returns the flags of a small training on the data set and of the model below ``root``, with ``more``."""
    given = ["--data", root / "set" / "data.yaml", "--model", root / "tiny.yaml", "--project", project]
    return [*map(str, [*given, "--cache-dir", root / "cache", *SMALL, *more])]


def call(main: Callable[[Sequence[str] | None], None], *argv: object) -> None:
    """Runs ``main(argv)`` as its script does."""
    run_main(main, [str(a) for a in argv])


def error_of(capsys: pytest.CaptureFixture, main, *argv: object, code: int = 2) -> str:
    """Returns the error line with which ``main(argv)`` ends, with exit status ``code``."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        call(main, *argv)
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == code, "\n".join(lines)
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


def run_python(
    *argv: object, folder: Path = ROOT, torchrun: int = 1, code: int = 0, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Runs ``python ARGV`` in ``folder``, with torchrun for several processes. Fails unless it exits with ``code``."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", torchrun] if torchrun > 1 else []
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHED}
    done = subprocess.run(
        [python(), *map(str, [*launch, *argv])],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done
