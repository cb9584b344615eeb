"""A data set of 18 images in two splits, and its index."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from data.index import DatasetIndex
from data.read_spec import load_dataset_spec
from tests.helpers.tiny import write_dataset
from tools.kfold import joined_index
from utils.config.tool_settings import KfoldConfig


def write_eighteen_images(folder: Path) -> KfoldConfig:
    """Writes the data set, and returns the settings of a cross-validation on it."""
    data = write_dataset(folder / "set", train=12, val=6)
    return KfoldConfig(data=str(data), cache_dir=str(folder / "cache"), folds=3, workers=0)


def index_of(config: KfoldConfig) -> DatasetIndex:
    """Returns the index of both splits."""
    return joined_index(load_dataset_spec(config.data), config)


def transfer(how: Callable[[str, str], object], old: str, new: str) -> None:
    """Copies or moves an image with its labels."""
    how(old, new)
    how(label_of(old), label_of(new))


def label_of(image: str) -> str:
    """Returns the label file of an image."""
    return image.replace("images", "labels").replace(".png", ".txt")
