"""Changed labels, compared with the result of a separate, strict parser."""

from __future__ import annotations

from pathlib import Path

from tests.robustness.fuzzing import inputs
from tests.robustness.fuzzing.labels import (
    SIZES,
    OddJsonError,
    Reading,
    judge_boxes,
    strict_coco,
    strict_voc,
    strict_yolo,
)
from tests.robustness.fuzzing.targets.case import Case
from tests.robustness.fuzzing.world import scan


def label_file(root: Path, kind: str, name: str) -> Path:
    if kind == "coco":
        return root / "instances.json"
    folder, suffix = {"yolo": ("labels/train", ".txt"), "voc": ("voc", ".xml")}[kind]
    return (root / folder / name).with_suffix(suffix)


def readings(root: Path, kind: str) -> dict[str, Reading]:
    """The labels of each image as a strict reader reads them."""
    files = {name: label_file(root, kind, name).read_bytes() for name in SIZES}
    if kind == "yolo":
        return {name: strict_yolo(data, *SIZES[name]) for name, data in files.items()}
    if kind == "voc":
        return {name: strict_voc(data) for name, data in files.items()}
    try:
        return strict_coco(files["a.png"])
    except OddJsonError as error:
        raise AssertionError(f"taken, though {error}") from None
    except (TypeError, AttributeError, KeyError):  # annotations that are not JSON objects
        return {name: Reading([], True) for name in SIZES}


def labels(case: Case, kind: str) -> str:
    """Changed labels: the boxes are those that a strict reader reads, or the file is reported."""
    root = case.copy(case.world.labeled)
    changed = case.rng.choice(list(SIZES))
    others = [label_file(root, kind, name).read_bytes() for name in SIZES]
    path = label_file(root, kind, changed)
    case.change(path, others=others, by=inputs.change_rows if kind == "yolo" else None)
    index = scan(root, kind, case.folder / "cache")
    verdicts = {}
    read = readings(root, kind)
    for name in SIZES:
        if name in read:
            verdicts[name] = judge_boxes(index, name, read[name], label_file(root, kind, name).name)
        else:
            assert any(name in line for line in map(str, index.report.findings)), f"{name} is left out in silence"
            verdicts[name] = "left out by name"
    return verdicts[changed]
