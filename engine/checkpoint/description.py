"""The description of a run in all of its checkpoints: model, settings and data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.checkpoint.data_identity import DataIdentity
from utils.config.settings import Hyperparameters, TrainConfig, names_with

# The settings that decide what each step computes. Files are compared by content: the data by its identity, the
# teacher by its checksum. The recipe is compared by its values.
_STEP_SETTINGS = names_with(TrainConfig, scope="result") - names_with(TrainConfig, is_path=True) - {"patience"}


@dataclass(frozen=True, kw_only=True)
class NamedFiles:
    """The files that the settings of a run name, by setting, as they were when the run took them over."""

    typed: dict[str, str] = field(default_factory=dict)  # absolute path of what the command line said, a name or a path
    # Of each file but the YAML of the data set, whose labels are compared instead (`RunDescription.data`).
    sha256: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """The model, the settings and the data of a run, as all of its checkpoints store them."""

    run_id: str = ""  # see `engine.checkpoint.newest_run`
    model_spec: dict[str, Any]
    names: list[str]  # of the classes
    used_classes: list[str] = field(default_factory=list)  # names of the data set's classes that --classes chose
    imgsz: int = 0
    bits: int = 8  # per image channel; the number of channels is in ``model_spec``
    config: TrainConfig
    hyp: Hyperparameters
    files: NamedFiles = field(default_factory=NamedFiles)
    data: dict[str, str]  # location of the data set (`utils.files.data_location`), and its `DataIdentity`
    val_images: list[str] = field(default_factory=list)  # held out by --val-fraction: names in the data set's folder
    tile: int = 0  # side of the tiles of the data set's images, pixels; 0: whole images
    pretrained: dict[str, list[int]] = field(default_factory=dict)  # parameters from weights, and their random rows
    new_lr_mult: float | None = None  # see `engine.optim.build.LoadedParameters`; None: not known
    origin: dict[str, str] = field(default_factory=dict)  # see `models.weights.origin.Origin`
    teacher: dict[str, str] = field(default_factory=dict)  # path of the model that teaches it, sha256 of its tensors

    @property
    def identity(self) -> DataIdentity:
        """Identifies the images and labels."""
        return DataIdentity.stored_in(self.data)

    def trains_like(self, other: RunDescription) -> bool:
        """Returns True if a run with this description computes the same steps as the run of ``other``."""
        same_config = all(getattr(self.config, name) == getattr(other.config, name) for name in _STEP_SETTINGS)
        same_teacher = self.teacher.get("sha256") == other.teacher.get("sha256")
        same_data = self.identity.is_same(other.identity) and self.bits == other.bits
        return same_config and same_teacher and same_data and self.hyp == other.hyp

    def validates_like(self, other: RunDescription) -> bool:
        """Returns True if the scores of both runs are comparable: on the same images, at the same size."""
        return self.identity.may_validate_alike(other.identity) and self.imgsz == other.imgsz
