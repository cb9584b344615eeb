"""SIGKILL at random moments does not change the result (see tests/robustness/kills.py for the comparison)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from tests.helpers.preloaded import python
from tests.helpers.same_content import same_content
from tests.helpers.scripts import SMALL
from tests.helpers.tiny import write_dataset, write_model
from tests.robustness.kills import prove, prove_calls
from utils.files.checkpoint import read_checkpoint

ROOT = Path(__file__).parents[2]
KILLER = """
import os, signal

def on_step(run):
    if run.rank == run.world_size - 1 and run.step == int(os.environ.get("KILL_AT", "0")):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_six_kills_do_not_change_the_result(tmp_path: Path):
    """On one rank and on two."""
    prove(tmp_path, kills=6, worlds=[1, 1, 2], seed=1)


@pytest.mark.slow
def test_a_hundred_kills_do_not_change_the_result(tmp_path: Path):
    """The number of ranks is drawn again at every resume."""
    prove(tmp_path, kills=100, worlds=[1, 2, 4], seed=2)


def test_kills_at_calls_that_change_files_do_not_change_the_result(tmp_path: Path):
    """tests/data/cache/test_open.py has a kill while a disk cache is filled."""
    prove_calls(tmp_path, 2)


@pytest.mark.slow
def test_forty_kills_at_calls_that_change_files_do_not_change_the_result(tmp_path: Path):
    prove_calls(tmp_path, 40)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_joined_and_mapped_classes_of_gray_images_keep_their_bits(tmp_path: Path, processes: int):
    """With --repeat-factor and --cls-pw: a run that is killed in its second epoch has the bits of one that is not."""
    gray = {"channels": 1, "bits": 12}
    for name, classes in (("a", {"ignore": ["dark"]}), ("b", {"classes": {"light": "bright"}})):
        data = write_dataset(tmp_path / name, train=8, val=3)
        data.write_text(yaml.safe_dump(yaml.safe_load(data.read_text()) | gray | classes))
        for path in data.parent.glob("images/*/*.png"):
            cv2.imwrite(str(path), cv2.imread(str(path), cv2.IMREAD_GRAYSCALE).astype(np.uint16) * 16)
    parts = ["a/data.yaml", "b/data.yaml"]
    (tmp_path / "both.yaml").write_text(yaml.safe_dump({"train": parts, "val": parts} | gray))
    (tmp_path / "killer.py").write_text(KILLER)
    flags = ["--data", tmp_path / "both.yaml", "--model", write_model(tmp_path / "tiny.yaml"), "--project", tmp_path]
    flags += [*SMALL, "--cache-dir", tmp_path, "--epochs", "3", "--virtual-ranks", "2", "--save-minutes", "1e-6"]
    flags += ["--repeat-factor", "0.9", "--cls-pw", "1", "--callbacks", "killer:on_step"]
    flags += ["--optimizer", "SGD"]
    spawn = ["--spawn", str(processes)] if processes > 1 else []

    def run(*command: object, kill_at: int = 0) -> int:
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "KILL_AT": str(kill_at)}
        command = [python(), "train.py", *map(str, command)]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False).returncode

    assert run(*flags, "--name", "whole") == 0
    whole = read_checkpoint(tmp_path / "whole" / "last.pt")
    steps = whole["progress"]["updates"] // 3
    assert run(*flags, *spawn, "--name", "killed", kill_at=steps + 2) != 0
    assert steps < read_checkpoint(tmp_path / "killed" / "last.pt")["progress"]["updates"] <= steps + 2
    assert run("--resume", tmp_path / "killed", *spawn) == 0
    killed = read_checkpoint(tmp_path / "killed" / "last.pt")
    for part in ("model", "ema", "optimizer"):
        same_content(whole[part], killed[part])
