"""Settings of a small training, callbacks that processes can import, and a script that calls the package."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from tests.helpers.preloaded import python
from tests.helpers.repository import ROOT

SMALL = {"imgsz": 64, "batch": 4, "device": "cpu", "workers": 0, "amp": "off", "plots": False, "threads": 1}


def on_end(run):
    (run.folder / "done.txt").touch()


class Interrupt:
    """Ctrl-C in the second epoch of two steps."""

    def on_step(self, run):
        if run.step == 3:
            os.kill(os.getpid(), signal.SIGINT)


class Terminate:
    """A scheduler's signal in the second epoch of two steps."""

    def on_step(self, run):
        if run.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


class Fail:
    """Fails at the end of a run."""

    def on_end(self, run):
        raise ValueError("no more")


def run_script(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    kept = {name: os.environ[name] for name in ("PATH", "LOCKSTEP_TEST_PYTHON") if name in os.environ}
    environment = {**kept, "PYTHONPATH": str(ROOT), "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [python(), "script.py"], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
