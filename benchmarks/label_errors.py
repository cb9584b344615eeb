"""How many planted label errors `python -m data.check --weights` ranks first, compared with chance and cleanlab.

    python -m benchmarks.label_errors --data bccd.yaml --weights yolov8n.pt --work /scratch/planted --peer PYTHON

A copy of the data set gets errors (`planted_errors.py`), a short training fits them, and the ranked list is compared
with what was planted: the fraction found among the first tenth (of the number of labels), and among the first N, the
number planted. "Chance" is a random order of labels and of unlabeled detections above 0.25. cleanlab ranks the same
detections.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.planted_errors import KINDS, Planted, plant
from benchmarks.report import ROOT, append_log
from data.check.issues import LABEL_ERRORS, MISSED
from data.check.scanned import CheckedSplit, scan_dataset
from data.index.dataset_yaml import load_dataset_spec
from engine.tools.check.label_errors import label_issues, open_predictor
from utils.boxes import cxcywh_to_xyxy, scale_boxes, xywh_to_xyxy
from utils.structures import DetectionTable

SURE = 0.25  # detections that count as objects by chance
HIGH = (None, 0.5)  # cleanlab's threshold of confident detections: its default, and one that fits these confidences


class Entry(NamedTuple):
    """An entry of a ranked list."""

    image: str
    is_label: bool  # else a missing label
    box_xyxy_px: tuple[float, ...]


class Truth:
    """The planted errors, by image."""

    def __init__(self, planted: list[Planted], sizes: dict[str, tuple[int, int]]) -> None:
        self.planted = planted
        self._of_image: dict[str, list[tuple[int, np.ndarray]]] = {}
        for number, error in enumerate(planted):
            height, width = sizes[error.image]
            box = scale_boxes(cxcywh_to_xyxy(np.array(error.box)), width, height)
            self._of_image.setdefault(error.image, []).append((number, box))

    def found(self, ranked: list[Entry]) -> np.ndarray:
        """For each entry the planted error that it is the first to name, -1 for none: int64 (n,)."""
        seen: set[int] = set()
        result = np.full(len(ranked), -1)
        for position, entry in enumerate(ranked):
            for number, box in self._of_image.get(entry.image, ()):
                is_label = self.planted[number].kind != "dropped"
                least = 0.95 if is_label else 0.5  # label files are rounded; an object is detected roughly
                if number not in seen and is_label == entry.is_label and _iou(box, entry.box_xyxy_px) >= least:
                    seen.add(number)
                    result[position] = number
                    break
        return result


def _iou(a: np.ndarray, b: tuple[float, ...]) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    overlap = max(width, 0) * max(height, 0)
    return overlap / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - overlap)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.label_errors", description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="data set YAML with YOLO txt labels; it is copied")
    parser.add_argument("--weights", required=True, help="where the training starts")
    parser.add_argument("--work", type=Path, required=True, help="a new folder for the copy and the run")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--fraction", type=float, default=0.05, help="of the boxes, for each kind of error")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peer", default="", help="Python of an environment with cleanlab; empty: ours alone")
    parser.add_argument("--log", action="store_true", help="append a dated row to benchmarks/README.md")
    options = parser.parse_args()

    data, planted, duplicates = plant(
        options.data, options.work / "set", fraction=options.fraction, duplicates=10, seed=options.seed
    )
    best = _train(data, options)
    print(f"duplicates found: {_duplicates_found(data, duplicates)} of {len(duplicates)}")
    spec = load_dataset_spec(data)
    splits = scan_dataset(spec, tuple(spec.splits), workers=1, verify="sample")
    predictor = open_predictor(str(best), imgsz=0, device="cpu")
    sizes = {n: tuple(hw) for s in splits for n, hw in zip(s.index.paths, s.index.image_hw.tolist())}
    truth = Truth(planted, sizes)
    labels = sum(len(split.index.classes) for split in splits)
    issues, detections = label_issues(predictor, splits, 0)
    tables = [detections[split.name] for split in splits]
    lists = {"chance": _chance(splits, tables, options.seed)}
    assert {issue.kind for issue in issues} <= set(LABEL_ERRORS)
    for high in HIGH if options.peer else ():
        name = "cleanlab" if high is None else f"cleanlab, threshold {high}"
        lists[name] = _cleanlab(splits, tables, options.peer, options.work, high)
    lists["data.check"] = [
        Entry(i.images[0], i.kind != MISSED, (i.suggestion if i.kind == MISSED else i.boxes[0]).xyxy_px) for i in issues
    ]
    rows = [_row(name, truth, ranked, labels) for name, ranked in lists.items()]
    print(*rows, sep="\n")
    if options.log:
        title = f"{len(planted)} label errors planted in {Path(options.data).stem}, {options.epochs} epochs"
        append_log(f"{title}. " + " ".join(rows))


def _train(data: Path, options: argparse.Namespace) -> Path:
    command = [sys.executable, "train.py", "--data", data, "--weights", options.weights, "--epochs", options.epochs]
    command += ["--imgsz", options.imgsz, "--device", "cpu", "--workers", 1, "--noplots", "--val-every", 0]
    command += ["--project", options.work / "run"]
    subprocess.run([str(c) for c in command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return options.work / "run" / "exp" / "last.pt"


def _duplicates_found(data: Path, duplicates: list[list[str]]) -> int:
    command = [sys.executable, "-m", "data.check", str(data), "--json", "--noplots"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    groups = [set(issue.get("images", ())) for issue in json.loads(done.stdout)["issues"]]
    return sum(any(set(pair) <= group for group in groups) for pair in duplicates)


def _chance(splits: list[CheckedSplit], tables: list[DetectionTable], seed: int) -> list[Entry]:
    entries = []
    for split, table in zip(splits, tables):
        index = split.index
        names, boxes = list(index.paths), xywh_to_xyxy(index.boxes_xywh_px)
        image = np.repeat(np.arange(len(index)), np.diff(index.offsets))
        entries += [Entry(names[i], True, tuple(box)) for i, box in zip(image, boxes.tolist())]
        for row in np.flatnonzero(table.scores > SURE):
            box, i = table.boxes_xyxy_px[row], int(table.image_index[row])
            if all(_iou(box, other) < 0.5 for other in boxes[index.offsets[i] : index.offsets[i + 1]].tolist()):
                entries.append(Entry(names[i], False, tuple(box)))
    return [entries[i] for i in np.random.default_rng(seed).permutation(len(entries))]


def _cleanlab(
    splits: list[CheckedSplit], tables: list[DetectionTable], peer: str, work: Path, high: float | None
) -> list[Entry]:
    images, names = [], []
    for split, table in zip(splits, tables):
        boxes = xywh_to_xyxy(split.index.boxes_xywh_px)
        columns = np.column_stack([table.boxes_xyxy_px, table.scores, table.classes])
        for i, name in enumerate(split.index.paths):
            rows = slice(split.index.offsets[i], split.index.offsets[i + 1])
            found = columns[table.image_index == i]
            images.append(
                {
                    "boxes": boxes[rows].tolist(),
                    "classes": split.index.classes[rows].tolist(),
                    "detections": found.tolist(),
                }
            )
            names.append(name)
    source, target = work / "cleanlab_in.json", work / "cleanlab_out.json"
    source.write_text(json.dumps({"images": images, "classes": len(splits[0].index.names)}))
    side = ROOT / "benchmarks" / "cleanlab_side.py"
    command = [peer, str(side), str(source), str(target), *([] if high is None else [str(high)])]
    subprocess.run(command, check=True)
    return [
        Entry(
            names[i], row >= 0, tuple(images[i]["boxes"][row] if row >= 0 else images[i]["detections"][detection][:4])
        )
        for _, i, row, detection in json.loads(target.read_text())
    ]


def _row(name: str, truth: Truth, ranked: list[Entry], labels: int) -> str:
    found = truth.found(ranked)
    total = Counter(error.kind for error in truth.planted)
    parts = []
    for title, count in (("first tenth", labels // 10), ("first N", len(truth.planted))):
        hits = found[:count][found[:count] >= 0]
        by_kind = Counter(truth.planted[n].kind for n in hits)
        kinds = ", ".join(f"{kind} {by_kind[kind] / max(total[kind], 1):.2f}" for kind in KINDS)
        parts.append(f"{title} ({count}) {len(hits) / len(truth.planted):.3f} ({kinds})")
    return f"{name}: " + "; ".join(parts) + "."


if __name__ == "__main__":
    main()
