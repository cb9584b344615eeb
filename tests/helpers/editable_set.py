"""A small data set on the disk whose files a test changes."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import yaml

from tests.helpers.synthetic_index import smooth_image

NAMES = ["cat", "dog"]
ROWS = "0 0.3 0.3 0.3 0.3\n1 0.7 0.7 0.3 0.3\n"


class EditableSet:
    """A clean data set of four training and two validation images, whose files a test changes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.yaml = root / "data.yaml"
        rng = np.random.default_rng(0)
        for split, count in (("train", 4), ("val", 2)):
            for i in range(count):
                self.add(f"{split}/{i}", smooth_image(rng, 128, 160))
        self.describe(NAMES)

    def describe(self, names: list[str]) -> None:
        """Writes the YAML, with these classes."""
        content = {"train": "images/train", "val": "images/val", "names": names}
        self.yaml.write_text(yaml.safe_dump(content), encoding="utf-8")

    def add(self, name: str, image: np.ndarray, rows: str | None = ROWS) -> None:
        """Writes an image (H, W, 3) BGR, and its label file unless ``rows`` is None. ``name``: such as train/0."""
        path = self.image(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(cv2.imencode(".png", image)[1].tobytes())
        if rows is not None:
            self.write(name, rows)

    def image(self, name: str) -> Path:
        return self.root / "images" / f"{name}.png"

    def write(self, name: str, rows: str) -> None:
        """Writes the label file of an image."""
        path = self.root / "labels" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(rows, encoding="utf-8")

    def content(self) -> dict[Path, bytes]:
        """Returns all files below the data set's folder."""
        return {path: path.read_bytes() for path in self.root.rglob("*") if path.is_file()}
