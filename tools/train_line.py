"""The line with which tools that write a data set say how to train on it."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path

from utils.config.commands import COMMANDS
from utils.config.settings import TrainConfig


def train_line(data: Path, splits: Collection[str], *, max_bad: float) -> str:
    """Returns the command that trains on ``data``, or the reason why the data cannot be trained on.

    Args:
        splits: names of the splits of ``data``.
        max_bad: the fraction of unusable labels and images that was accepted when ``data`` was written.
    """
    if "train" not in splits:
        return f"training needs a 'train' split, but {data} has only {', '.join(splits)}"
    command = [*COMMANDS["train"].typed.split(), "--data", str(data)]
    if "val" not in splits:
        command += ["--val-fraction", "0.2"]
    if max_bad != TrainConfig.max_bad:
        command += ["--max-bad", str(max_bad)]
    return f"train: {shlex.join(command)}"
