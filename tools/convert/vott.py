"""Reads VoTT's JSON: one file per export, or in a project one file per image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data.labels.json_files import load_json
from tools.convert.annotations import AnnotatedBox, Annotations, Entry
from tools.convert.values import image_name, name_of, numbers, objects_in, parse_size
from utils.errors import UserError, one_line
from utils.schema import check

_NOT_VISITED = 0  # state of an image that nobody has looked at
_WITHOUT_AREA = ("point", "polyline")


def read_vott(file: Path, annotations: Annotations) -> None:
    """Adds the boxes of all regions; a region with several tags is one object for each tag. Images that nobody has
    looked at are left out."""
    content = check(load_json(file, "a VoTT JSON"), dict, str(file))
    assets = {file.stem: content} if "asset" in content else check(content.get("assets"), dict, f"{file}: assets")
    for key, item in assets.items():
        location = f"{file}: asset {one_line(key)[:60]}"
        entry = check(item, dict, location)
        boxes: list[AnnotatedBox | None] = []
        for position, region in enumerate(objects_in(entry, "regions", location)):
            boxes += _boxes(region, f"{location}: region {position}", annotations)
        asset = check(entry.get("asset"), dict, location)
        if not boxes and asset.get("state") == _NOT_VISITED:
            continue
        sides = asset.get("size")
        size = None
        if isinstance(sides, dict):
            size = parse_size(sides.get("width"), sides.get("height"), location)
        name = image_name(asset.get("name"), location)
        annotations.add(Entry(image=name, boxes=boxes, location=location, file=file, size=size, is_complete=True))


def _boxes(region: dict[str, Any], location: str, annotations: Annotations) -> list[AnnotatedBox | None]:
    """Returns a box for each tag of a region."""
    tags = check(region.get("tags"), list, f"{location}: tags")
    if not tags:
        raise UserError(f"{location}: has no tag, and so no class")
    kind = str(region.get("type") or "").lower()
    if kind in _WITHOUT_AREA:
        annotations.skipped.add(kind, location)
        return [None]
    sides = check(region.get("boundingBox"), dict, location)
    xywh = numbers(sides, ("left", "top", "width", "height"), location)
    return [AnnotatedBox.of_xywh(name_of(tag, f"{location}: tags"), *xywh) for tag in tags]
