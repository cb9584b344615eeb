"""The description of a run in all of its checkpoints: model, settings and data."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from engine.checkpoint.data_identity import DataIdentity
from utils.config.settings import Hyperparameters, TrainConfig, names_with
from utils.errors import UserError
from utils.files.torch_file import read_checkpoint
from utils.schema import build

# The settings that decide what each step computes. Files are compared by content: the data by its identity, the
# teacher by its checksum. The recipe is compared by its values.
_STEP_SETTINGS = names_with(TrainConfig, scope="result") - names_with(TrainConfig, is_path=True) - {"patience"}


@dataclass(frozen=True, kw_only=True)
class NamedFiles:
    """The files that the settings of a run name, by setting, as they were when the run took them over."""

    typed: dict[str, str] = field(default_factory=dict)  # absolute path of what the command line said, a name or a path
    # Checksum of each file except the YAML of the data set, whose labels are compared instead (`DataIdentity`).
    sha256: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """The model, the settings and the data of a run, as all of its checkpoints store them."""

    run_id: str  # see `engine.checkpoint.newest_run`
    model_spec: dict[str, Any]
    names: list[str]  # class names
    used_classes: list[str]  # names of the data set's classes that --classes chose
    imgsz: int
    bits: int  # per image channel; the number of channels is in ``model_spec``
    config: TrainConfig
    hyp: Hyperparameters
    files: NamedFiles = field(default_factory=NamedFiles)  # best.pt leaves them out
    data: dict[str, str]  # location of the data set, see `engine.checkpoint.data_location`
    identity: DataIdentity
    val_images: list[str]  # held out by --val-fraction: names in the data set's folder
    tile: int  # side of the tiles of the data set's images, pixels; 0: whole images
    pretrained: dict[str, list[int]]  # parameters from weights, and their random rows
    new_lr_mult: float  # see `engine.optim.build.LoadedParameters`
    origin: dict[str, str]  # see `models.weights.origin.Origin`
    # Path of the model that teaches it, sha256 of its tensors; empty: none. best.pt leaves it out.
    teacher: dict[str, str] = field(default_factory=dict)

    def trains_like(self, other: RunDescription) -> bool:
        """Returns True if a run with this description computes the same steps as the run of ``other``."""
        same_config = all(getattr(self.config, name) == getattr(other.config, name) for name in _STEP_SETTINGS)
        same_teacher = self.teacher.get("sha256") == other.teacher.get("sha256")
        same_data = self.identity == other.identity and self.bits == other.bits
        return same_config and same_teacher and same_data and self.hyp == other.hyp

    def validates_like(self, other: RunDescription) -> bool:
        """Returns True if the scores of both runs are comparable: on the same images, at the same size."""
        return self.identity.val_labels == other.identity.val_labels and self.imgsz == other.imgsz


def read_description(path: Path) -> RunDescription | None:
    """Reads the description in the checkpoint ``path``, without its tensors; None if the file is missing or damaged."""
    names = {item.name for item in fields(RunDescription)}
    try:
        content = read_checkpoint(path)
        return build(RunDescription, {name: content[name] for name in names & content.keys()}, str(path))
    except UserError:
        return None
