"""Lists the images of a split and their label files (rules D1 to D4 of docs/data.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data.dataset.spec import DatasetSpec
from data.labels.findings import Finding
from data.labels.formats import LabelFormat


@dataclass(frozen=True)
class Listing:
    """The images of a split, sorted by name, and their label files. Names are relative to `root`, with ``/``."""

    root: Path  # the data set's folder
    images: list[str]  # N
    image_stamps: np.ndarray  # int64 (N, 2): size in bytes, modification time in ns
    label_format: LabelFormat
    labels: list[str]  # N: each image's label file, or where it would be; or one name: a JSON for all images
    label_stamps: np.ndarray  # int64 (len(labels), 2); (-1, -1) where no file exists (a background)
    findings: list[Finding]  # about images and label files that are not used; `Finding.image` is -1
    json_images: list[str] = field(default_factory=list)  # JSON only: images of all splits that name it, sorted
    has_missing_split: bool = False  # JSON only: a split that names it has no folder or list
