"""The commands of this program. See docs/architecture.md ("Processes") for what is derived from them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from utils.config.settings import DetectConfig, ExportConfig, TrainConfig, ValConfig
from utils.config.tool_settings import (
    CheckConfig,
    ConvertConfig,
    DemoConfig,
    KfoldConfig,
    SearchConfig,
    ShardConfig,
    WeightsConfig,
)
from utils.program import IS_INSTALLED

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of this program.

    Args:
        name: as in ``lockstep NAME``.
        settings: the dataclass of its settings; each field is a flag, or a positional argument.
        path: the module with its ``main``, which takes the words after the command.
        description: for ``--help``; ``lockstep --help`` lists its first clause.
        example: arguments of the command line with which ``--help`` ends.
        is_one_process: whether a launcher (torchrun, mpirun, srun) must not start several processes of the command.
        divides_work: whether copies that a launcher without ranks (srun, mpirun) starts divide the work.
        instead: what to do instead of starting several processes, for the message that refuses them.
    """

    name: str
    settings: type[DataclassInstance]
    path: str
    description: str
    example: str
    is_one_process: bool = True
    divides_work: bool = False
    instead: str = "start it once"

    @property
    def summary(self) -> str:
        """What the command does, in a clause."""
        return re.split(r"[:.](?: |$)", self.description)[0]

    @property
    def is_tool(self) -> bool:
        """Whether the command is in tools/ rather than a script."""
        return "/" in self.path

    @property
    def module(self) -> str:
        """The name of the command's module."""
        # In the installed package, scripts are in the package lockstep.scripts.
        package = "lockstep." if self.is_tool else "lockstep.scripts."
        return (package if IS_INSTALLED else "") + self.path.replace("/", ".")

    @property
    def title(self) -> str:
        """The command's name in a sentence: ``tools.check``, ``export.py``."""
        return f"tools.{self.name}" if self.is_tool else f"{self.name}.py"

    @property
    def typed(self) -> str:
        """The command as users type it."""
        if IS_INSTALLED:
            return f"lockstep {self.name}"
        return "python " + (f"-m {self.title}" if self.is_tool else self.title)


_COMMANDS = (
    Command(
        name="train",
        settings=TrainConfig,
        path="train",
        description="Trains a detector.",
        example="--data DATA.yaml --weights yolox_s --epochs 50",
        is_one_process=False,
    ),
    Command(
        name="val",
        settings=ValConfig,
        path="val",
        description=(
            "Scores checkpoints and exported files on a data set: COCO's AP, precision, recall and F1, per class and "
            "by size."
        ),
        example="--weights runs/train/exp/best.pt",
        is_one_process=False,
    ),
    Command(
        name="detect",
        settings=DetectConfig,
        path="detect",
        description=(
            "Finds objects in images, folders, videos, webcams and streams: writes annotated media, labels, JSON and "
            "crops."
        ),
        example="--weights runs/train/exp/best.pt --source image.jpg",
    ),
    Command(
        name="export",
        settings=ExportConfig,
        path="export",
        description=(
            "Exports a checkpoint to other formats: ONNX, OpenVINO, ncnn, TFLite, TorchScript and torch.export. "
            "Compares the files with the checkpoint."
        ),
        example="--weights runs/train/exp/best.pt --format onnx",
    ),
    Command(
        name="check",
        settings=CheckConfig,
        path="tools/check/__main__",
        description=(
            "Checks a data set, and with a trained model, its labels: files, near-duplicate images, sizes and classes. "
            "The exit status is 0 if there is nothing to report, 1 if there is, and 2 if the check could not run."
        ),
        example="DATA.yaml",
    ),
    Command(
        name="kfold",
        settings=KfoldConfig,
        path="tools/kfold",
        description=(
            "Trains and scores by cross-validation: for each fold, trains on the others and scores on it; then scores "
            "all images together."
        ),
        example="--data DATA.yaml --folds 5 --epochs 100",
        instead="start it once; --spawn N trains on N processes",
    ),
    Command(
        name="search",
        settings=SearchConfig,
        path="tools/search",
        description="Searches hyper-parameters: trains with different values and reports the best.",
        example="--data DATA.yaml --hyp optimizer --trials 30",
        divides_work=True,
        instead="start it without torchrun; --spawn N trains each trial on N processes",
    ),
    Command(
        name="convert",
        settings=ConvertConfig,
        path="tools/convert/__main__",
        description=(
            "Writes COCO JSON of a data set in any format that --data reads, or of Hugging Face, and a YAML for --data."
        ),
        example="DATA out.json",
    ),
    Command(
        name="shard",
        settings=ShardConfig,
        path="tools/shard/__main__",
        description="Writes a data set as shards: tar files of images, with one index for each split.",
        example="DATA.yaml OUT",
    ),
    Command(
        name="weights",
        settings=WeightsConfig,
        path="tools/weights/__main__",
        description=(
            "Converts the weights of a checkpoint: those of another program, too, to safetensors or to a checkpoint of "
            "this program."
        ),
        example="yolov8n.pt yolov8n.safetensors",
    ),
    Command(
        name="demo",
        settings=DemoConfig,
        path="tools/demo",
        description="Writes the demo data set to a folder.",
        example="OUT",
    ),
)
COMMANDS = {command.name: command for command in _COMMANDS}


def command_of(settings: type) -> Command:
    """Returns the command that a class of settings belongs to."""
    return next(command for command in _COMMANDS if command.settings is settings)
