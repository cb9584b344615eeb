"""A data set of twenty images whose labels a test places."""

from __future__ import annotations

import errno
import os
import unicodedata
from pathlib import Path

import pytest

from data.index.index import DatasetIndex
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.source.dataset_yaml import load_dataset_spec
from tests.helpers.three_formats import voc_text, write_image, yolo_text

NUM_IMAGES = 20
BOX = (0, 10, 8, 30, 32)
TEXT = yolo_text([BOX], 48, 64)
OTHER_TEXT = yolo_text([(0, 1, 1, 9, 9)], 48, 64)
VOC_TEXT = voc_text([BOX], ["a"], 48, 64)
ACCENTED = unicodedata.normalize("NFC", "é")


class Folder:
    """A data set of images 00 to 19 in images/train, whose labels a test places."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.images = "images/train"
        self.more = ""

    def image(self, name: str) -> None:
        write_image(self.root / name, 48, 64)

    def label(self, name: str, text: str = TEXT) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def write(self, image: str = "images/train/{}.png", label: str = "labels/train/{}.txt", but: int = -1) -> None:
        for i in range(NUM_IMAGES):
            self.image(image.format(f"{i:02}"))
            if i != but:
                self.label(label.format(f"{i:02}"))

    def index(self, **options: object) -> DatasetIndex:
        return load_index(load_dataset_spec(self.yaml()), "train", IndexSettings(progress=False, **options))

    def yaml(self) -> Path:
        path = self.root / "data.yaml"
        path.write_text(f"train: {self.images}\nval: {self.images}\nnames: [a]\n{self.more}", encoding="utf-8")
        return path


def write_voc(folder: Folder, name: str, filename: str = "{}.png") -> None:
    folder.more = "annotations: voc\n"
    for i in range(NUM_IMAGES):
        folder.image(f"images/train/{i:02}.png")
        text = VOC_TEXT.replace("<annotation>", f"<annotation><filename>{filename.format(f'{i:02}')}</filename>")
        folder.label(name.format(f"{i:02}"), text)


def write_one_labeled_of_two(folder: Folder) -> str:
    """Writes images a/x and b/x, of which only the first has a label file; returns the file's text."""
    folder.more = "annotations: voc\n"
    text = VOC_TEXT.replace("<annotation>", "<annotation><filename>x.png</filename>")
    for group in "ab":
        folder.image(f"images/train/{group}/x.png")
    folder.label("voc/a/x.xml", text)
    return text


def forbid_search(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Makes the content of a folder inaccessible, but not its listing, as ``chmod a-x`` does for all users but root."""
    plain = os.stat

    def checked(path: str | os.PathLike | int, *args, **options) -> os.stat_result:
        if not isinstance(path, int) and folder in Path(path).parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return plain(path, *args, **options)

    patch.setattr(os, "stat", checked)
