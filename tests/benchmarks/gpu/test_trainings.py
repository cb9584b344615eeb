"""Whole trainings: which epochs their rates count, and failures of one of several."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.gpu import trainings
from tests.helpers.tiny import write_dataset

pytestmark = pytest.mark.benchmarks


def training_options(**changes) -> Namespace:
    settings = {"data": "d.yaml", "model": "yolov8n", "imgsz": 64, "batch_size": 4, "epochs": 3, "device": "0"}
    return Namespace(**settings | {"peer": ""} | changes)


def write_results(folder: Path, seconds: list[float]) -> None:
    """Writes the results.csv of either program, whose epochs end after these seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [f"{number}, {second}, 0.25" for number, second in enumerate(seconds, 1)]
    (folder / "results.csv").write_text("\n".join(["epoch, time, speed/data_wait", *rows]))


def test_our_rate_leaves_out_the_first_epoch_and_the_validation_after_the_last(tmp_path: Path):
    """Two of four epochs, of two seconds each, count, as for the peer."""

    def run(options: Namespace, *command: str) -> str:
        assert command[command.index("--epochs") + 1] == "4"
        write_results(Path(command[command.index("--project") + 1], "exp"), [10, 12, 14, 99])
        return ""

    options = training_options(data=str(write_dataset(tmp_path, train=6, val=1)))
    assert trainings.our_speed(options, [], run=run) == (3.0, 0.25)


# Stands in for the peer's Python, which gets the program and its flags.
PEER = """\
#!{python} -IS
import os, sys
command = sys.argv
assert command[command.index("--epochs") + 1] == "4"
folder = os.path.join(command[command.index("--project") + 1], "train")
os.mkdir(folder)
with open(os.path.join(folder, "results.csv"), "w") as file:
    file.write("epoch, time\\n1, 10\\n2, 12\\n3, 14\\n4, 99\\n")
"""


def test_the_peers_rate_is_that_of_the_same_epochs(tmp_path: Path):
    peer = tmp_path / "peer"
    peer.write_text(PEER.format(python=sys.executable))
    peer.chmod(0o755)
    data = write_dataset(tmp_path / "set", train=6, val=1)
    assert trainings.peer_speed(training_options(peer=str(peer), data=str(data))) == 3.0
