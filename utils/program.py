"""This program: its version, its commands as users type them, and how another process starts one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

VERSION = "0.1.0"
IS_INSTALLED = __name__.startswith("lockstep.")


class Command(NamedTuple):
    name: str
    summary: str  # for --help
    path: str  # of the module whose ``main`` takes its arguments

    @property
    def typed(self) -> str:
        """What users type before its arguments."""
        if IS_INSTALLED:
            return f"lockstep {self.name}"
        return "python " + (f"-m tools.{self.name}" if "/" in self.path else f"{self.name}.py")


_COMMANDS = (
    Command("train", "train a detector", "train"),
    Command("val", "score checkpoints and exported files on a data set", "val"),
    Command("detect", "find objects in images, videos and streams", "detect"),
    Command("export", "export a checkpoint to ONNX, OpenVINO, TorchScript or torch.export", "export"),
    Command("check", "check a data set, and with a trained model, its labels", "tools/check/__main__"),
    Command("compare", "compare runs, with intervals of the differences", "tools/compare"),
    Command("kfold", "train and score by cross-validation", "tools/kfold/__main__"),
    Command("search", "search hyper-parameters", "tools/search/__main__"),
    Command("convert", "convert the export of an annotation tool to COCO JSON", "tools/convert/__main__"),
    Command("shard", "write a data set as shards, for an object store", "tools/shard"),
    Command("cache", "list and remove caches of data sets", "tools/cache"),
    Command("weights", "list public weights, show and convert checkpoints", "tools/weights"),
    Command("demo", "write the demo data set to a folder", "tools/demo"),
)
COMMANDS = {command.name: command for command in _COMMANDS}


def start_of(command: str) -> list[str]:
    """The first words of a command line, for `subprocess`, that runs ``command`` with this Python: the command's own
    code, whatever the working folder contains."""
    package = Path(__file__).parents[1] / ("" if IS_INSTALLED else "lockstep")
    return [sys.executable, str(package / "__main__.py"), command]
