"""This program: its version, its commands as users type them, how another process starts one and gets its result."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

VERSION = "0.1.0"
STARTED = time.monotonic()  # about when this process started
IS_INSTALLED = __name__.startswith("lockstep.")
RESULT_VARIABLE = "LOCKSTEP_RESULT"  # names the file for the result, if another process has started this one


class Command(NamedTuple):
    """A command of this program."""

    name: str
    summary: str  # for --help
    path: str  # of the module whose ``main`` takes its arguments

    @property
    def module(self) -> str:
        """The name of that module. In the installed package, scripts are in a package of their own."""
        package = ""
        if IS_INSTALLED:
            package = "lockstep." if "/" in self.path else "lockstep.scripts."
        return package + self.path.replace("/", ".")

    @property
    def typed(self) -> str:
        """The command as users type it."""
        if IS_INSTALLED:
            return f"lockstep {self.name}"
        return "python " + (f"-m tools.{self.name}" if "/" in self.path else f"{self.name}.py")


_COMMANDS = (
    Command("train", "train a detector", "train"),
    Command("val", "score checkpoints and exported files on a data set", "val"),
    Command("detect", "find objects in images, videos and streams", "detect"),
    Command("export", "export a checkpoint to ONNX, OpenVINO, ncnn, TFLite, TorchScript or torch.export", "export"),
    Command("check", "check a data set, and with a trained model, its labels", "tools/check/__main__"),
    Command("kfold", "train and score by cross-validation", "tools/kfold/__main__"),
    Command("search", "search hyper-parameters", "tools/search/__main__"),
    Command("convert", "convert the export of an annotation tool to COCO JSON", "tools/convert/__main__"),
    Command("shard", "write a data set as shards: tar files with an index", "tools/shard"),
    Command("weights", "convert a checkpoint to safetensors, or to one of this program", "tools/weights"),
    Command("demo", "write the demo data set to a folder", "tools/demo"),
)
COMMANDS = {command.name: command for command in _COMMANDS}


def command_prefix(command: str) -> list[str]:
    """Returns the first words of a command line, for `subprocess`, that runs ``command`` with this Python and the
    command's own code, whatever the working folder contains."""
    package = Path(__file__).parents[1] / ("" if IS_INSTALLED else "lockstep")
    return [sys.executable, str(package / "__main__.py"), command]


def resume_flag(last: str | os.PathLike[str]) -> str:
    """Returns the flag of train.py that continues the run with the checkpoint ``last``. Messages always name the
    checkpoint: without it, ``--resume`` continues the newest run, which may be another one."""
    return f"--resume {shlex.quote(os.fspath(last))}"


def write_result(**values: Any) -> bool:
    """Adds ``values`` to the result file of the process that has started this one: "folder" of a run that has begun or
    continues, exported "files", "issues" of a data set, or the "error" and whether the command was "refused". Returns
    whether they are in such a file: there may be none, or its disk may be full."""
    path = os.environ.get(RESULT_VARIABLE)
    if not path:
        return False
    line = f"\n{json.dumps(values)}".encode()
    try:
        with open(path, "ab", buffering=0) as file:
            return file.write(line) == len(line)  # at once, as all processes of a run have the same file
    except OSError:
        return False


def read_result(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads what processes have written with `write_result`, without lines that are incomplete."""
    values: dict[str, Any] = {}
    with suppress(OSError):
        for line in Path(path).read_bytes().splitlines():
            with suppress(ValueError):
                values |= json.loads(line)
    return values


def report_error(line: str, *, is_disk_full: bool = False) -> None:
    """Prints why a command fails, or writes it to the result file of the process that has started this one.

    There it also says whether the command was refused: it has not begun or continued a run, or the disk is full. What
    was trained is then as it was, and another try would end in the same way.
    """
    path = os.environ.get(RESULT_VARIABLE)
    if path:
        has_begun = "folder" in read_result(path)
        if write_result(error=line, refused=is_disk_full or not has_begun):
            return
    print(f"error: {line}", file=sys.stderr, flush=True)
