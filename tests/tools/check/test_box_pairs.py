"""Boxes that repeat others, compared with a comparison of all pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.dataset.yaml_file import load_dataset_spec
from engine.report.issues import CheckedSplit
from tests.helpers.editable_set import EditableSet
from tools.check.boxes import MAX_PARTNERS, SAME_IOU, box_pairs
from tools.check.dataset_check import scan_split
from tools.check.issue_kinds import DOUBLED, TWO_CLASSES


def many_boxes(folder: Path, kind: str, count: int) -> CheckedSplit:
    """Writes and scans three images, the first with ``count`` boxes: copies of one another, a pile of one class with
    a single box of another, rows and cells of a table, or boxes all over the image."""
    data = EditableSet(folder)
    rng = np.random.default_rng(0)
    classes = rng.integers(0, 2, count)
    centers = rng.uniform(0.1, 0.9, (count, 2))
    sizes = rng.uniform(0.02, 0.1, (count, 2))
    if kind in ("copies", "one of another class"):
        centers = 0.5 + rng.normal(0, 0.01, (count, 2))
        sizes = 0.3 + rng.normal(0, 0.01, (count, 2))
    if kind == "one of another class":
        classes = np.arange(count) == count // 2
    elif kind == "rows":
        centers = np.stack([np.full(count, 0.5), np.linspace(0.1, 0.9, count)], 1)
        sizes = np.stack([np.full(count, 0.9), np.full(count, 0.8 / count)], 1)
    boxes = np.concatenate([classes[:, None], centers, sizes], 1)
    data.write("train/0", "".join(f"{int(c)} {x:.6f} {y:.6f} {w:.7f} {h:.7f}\n" for c, x, y, w, h in boxes))
    return scan_split(load_dataset_spec(data.yaml), "train", workers=0)


def iou_of(xyxy: np.ndarray) -> np.ndarray:
    """(n, n), of boxes (n, 4)."""
    sides = np.minimum(xyxy[:, None, 2:], xyxy[None, :, 2:]) - np.maximum(xyxy[:, None, :2], xyxy[None, :, :2])
    overlap = sides.clip(0).prod(2)
    areas = (xyxy[:, 2:] - xyxy[:, :2]).prod(1)
    return overlap / (areas[:, None] + areas[None] - overlap)


@pytest.mark.parametrize("kind", ["copies", "one of another class", "rows", "all over"])
def test_every_box_that_repeats_an_earlier_one_is_listed(tmp_path, kind):
    """Each is listed with at most a few of its partners. The reference is a plain comparison of all pairs."""
    split = many_boxes(tmp_path / "set", kind, 300)
    first = slice(*split.index.offsets[:2])
    xywh = split.index.boxes_xywh_px[first]
    classes = split.index.classes[first]
    is_pair = np.triu(iou_of(np.concatenate([xywh[:, :2], xywh[:, :2] + xywh[:, 2:]], 1)) > SAME_IOU, 1)
    is_pair &= ~split.index.repeated[first][:, None] & ~split.index.repeated[first][None]
    same = classes[:, None] == classes[None]
    issues = [issue for issue in box_pairs(split) if issue.images == ("images/train/0.png",)]
    for issue_kind, expected in ((DOUBLED, is_pair & same), (TWO_CLASSES, is_pair & ~same)):
        found = np.zeros_like(expected)
        for issue in (issue for issue in issues if issue.kind == issue_kind):
            found[issue.boxes[0].number, issue.boxes[1].number] = True
        assert not (found & ~expected).any()
        np.testing.assert_array_equal(found.sum(0), expected.sum(0).clip(max=MAX_PARTNERS))
    assert (len(issues) > 100) == (kind in ("copies", "one of another class"))
