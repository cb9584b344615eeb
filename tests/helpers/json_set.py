"""A data set on the disk whose splits share a COCO JSON, and requests to match its entries."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from data.labels.image_entries import ImageEntry
from data.labels.match_entries import MatchedEntries, match_entries
from data.labels.rows import RawLabels

from data.dataset.yaml_file import load_dataset_spec
from data.index.index import DatasetIndex
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.labels.label_format import LabelRequest
from data.split_files import ImageFile, OtherImages
from tests.helpers.three_formats import write_image

SPLITS = ("train", "val")


@dataclass
class JsonSet:
    """A data set in which every split has the same JSON, whose entries it collects."""

    root: Path
    file_names: list[str] = field(default_factory=list)
    num_objects: list[int] = field(default_factory=list)

    def add(self, path: str, count: int = 1, *, exists: bool = True, style: str = "{path}") -> None:
        """Adds an entry with ``count`` objects, and its image if it ``exists``."""
        if exists:
            self.write_image(path)
        self.file_names.append(style.format(path=path, below=path.partition("/")[2]))
        self.num_objects.append(count)

    def write_image(self, path: str) -> None:
        """Writes an image without an entry."""
        write_image(self.root / path, 20, 20)

    def describe(self, **content: object) -> Path:
        """Writes the JSON and the YAML."""
        image_ids = [i for i, count in enumerate(self.num_objects) for _ in range(count)]
        boxes = [[1 + k, 1, 5, 5] for count in self.num_objects for k in range(count)]
        coco = {
            "images": [{"id": i, "file_name": name} for i, name in enumerate(self.file_names)],
            "annotations": [
                {"id": k, "image_id": i, "category_id": 1, "bbox": box}
                for k, (i, box) in enumerate(zip(image_ids, boxes))
            ],
            "categories": [{"id": 1, "name": "a"}],
        }
        (self.root / "all.json").write_text(json.dumps(coco))
        path = self.root / "data.yaml"
        splits = {split: f"images/{split}" for split in SPLITS}
        path.write_text(yaml.safe_dump(splits | {"names": ["a"], "annotations": "all.json"} | content))
        return path


def numbered_set(root: Path) -> JsonSet:
    """Writes ten images for training and ten for validation, with other file names."""
    json_set = JsonSet(root)
    for i in range(10):
        json_set.add(f"images/train/{i}.png")
        json_set.add(f"images/val/{100 + i}.png")
    return json_set


def load(data: Path, split: str, **options: Any) -> DatasetIndex:
    """Loads a split of the data set of a YAML, whatever its losses."""
    defaults: dict[str, Any] = {"progress": False, "workers": 0, "max_bad": 1.0, "use_cache": False}
    return load_index(load_dataset_spec(data), split, IndexSettings(**defaults | options))


def lost(data: Path) -> list[tuple[int, int]]:
    """Returns the lost images and objects of train and val."""
    ledgers = [load(data, split).report.ledger for split in SPLITS]
    return [(ledger.lost_images, ledger.lost_objects) for ledger in ledgers]


def image_files(folder: str, names: Iterable[str]) -> list[ImageFile]:
    """Returns the images of a split in ``folder``, by their names in it."""
    return [ImageFile(name=f"{folder}/{name}", name_in_split=name, stamp=None) for name in names]


def entries_of(file_names: Iterable[str]) -> list[ImageEntry]:
    """Returns entries without labels."""
    return [ImageEntry(name, i, RawLabels([], [])) for i, name in enumerate(file_names)]


def match(entries: Sequence[ImageEntry], images: list[ImageFile], others: OtherImages | None = None) -> MatchedEntries:
    """Matches entries with the images of a split. ``others``: see `LabelRequest`."""
    request = LabelRequest(images=images, files=[], root=Path("/"), names=None, others=others or OtherImages())
    return match_entries(entries, request)
