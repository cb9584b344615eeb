"""Public YOLOv8 and YOLOv5 weights in this program against the outputs of the programs they come from.

    python -m benchmarks.public_weights --shared ../shared

``--shared`` holds weights/yolov8n.pt and yolov5n.pt, the reference outputs in golden/ (its README says how they were
made) and datasets/coco128. For each of the two: raw outputs on one picture, which must agree to 5e-3 pixels and 1e-4 in
score; then ``val.py`` on coco128 with its JSON labels at 640, whose AP by pycocotools must be the reference's within
0.002, and at least 99 % of the reference detections above a score of 0.1 must have a partner of the same class, with an
IoU above 0.98 and a score within 0.005. Exits with 1 if anything fails.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import cv2
import numpy as np
import torch
import yaml

from models.pretrained import load_detector
from utils.boxes import iou, xyxy_to_cxcywh

ROOT = Path(__file__).parents[1]
REFERENCES = {"yolov8n": (0.4713, 1), "yolov5n": (0.3594, 0)}  # AP, and the id that the reference gives to class 0
BOX_PX, SCORE, AP, PARTNERS = 5e-3, 1e-4, 0.002, 0.99


def raw_differences(shared: Path, name: str) -> tuple[float, float]:
    """Largest differences in box coordinates, pixels, and in scores from the reference outputs for one picture."""
    picture = cv2.imread(str(next((shared / "datasets" / "coco128").rglob("000000000009.jpg"))))
    canvas = np.full((640, 640, 3), 114, np.uint8)
    canvas[80:560] = picture[..., ::-1]
    detector, _ = load_detector(shared / "weights" / f"{name}.pt")
    with torch.inference_mode():
        boxes, scores = detector.decode(detector(torch.from_numpy(canvas).permute(2, 0, 1)[None].float() / 255))
    reference = torch.from_numpy(np.load(shared / "golden" / f"{name}_raw.npz")["output"])
    if detector.head.kind == "anchor":
        expected, objectness, classes = reference.split((4, 1, 80), -1)
        expected_scores = objectness * classes
    else:
        expected, expected_scores = reference.transpose(1, 2).split((4, 80), -1)
    return float((xyxy_to_cxcywh(boxes) - expected).abs().max()), float((scores - expected_scores).abs().max())


def validate(shared: Path, name: str, labels: Path, folder: Path, device: str) -> list[dict]:
    """What ``val.py`` finds on coco128, as it writes it."""
    data = {
        "path": str((shared / "datasets" / "coco128").resolve()),
        "train": "images/train2017",
        "val": "images/train2017",
        "names": yaml.safe_load((shared / "datasets" / "coco128" / "coco128.yaml").read_text())["names"],
        "annotations": {"val": str(labels.resolve())},
    }
    (folder / "coco128.yaml").write_text(yaml.safe_dump(data))
    command = [sys.executable, "val.py", "--weights", shared / "weights" / f"{name}.pt", "--data"]
    command += [folder / "coco128.yaml", "--imgsz", "640", "--project", folder, "--name", name, "--noplots"]
    command += ["--no-verbose", "--device", device]
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True)
    return json.loads((folder / name / "predictions.json").read_text())


def pycocotools_ap(labels: Path, detections: list[dict]) -> float:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(labels))
        evaluation = COCOeval(truth, truth.loadRes(detections), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[0])


def share_with_partner(shared: Path, name: str, first: int, labels: Path, detections: list[dict]) -> float:
    """Of the reference detections above a score of 0.1, the share that ours has a partner for."""
    categories = sorted(category["id"] for category in json.loads(labels.read_text())["categories"])
    with gzip.open(shared / "golden" / f"{name}_coco128_predictions.json.gz") as file:
        reference = [d for d in json.load(file) if d["score"] > 0.1]
    ours: dict[tuple[int, int], list[dict]] = {}
    for found in detections:
        ours.setdefault((found["image_id"], found["category_id"]), []).append(found)
    partners = 0
    for wanted in reference:
        there = ours.get((wanted["image_id"], categories[wanted["category_id"] - first]), [])
        close = [d for d in there if abs(d["score"] - wanted["score"]) <= 0.005]
        if close:
            boxes = _corners([d["bbox"] for d in close])
            partners += bool((iou(boxes, _corners([wanted["bbox"]]).expand_as(boxes)) > 0.98).any())
    return partners / len(reference)


def _corners(xywh: list[list[float]]) -> torch.Tensor:
    boxes = torch.tensor(xywh, dtype=torch.float64)
    return torch.cat((boxes[:, :2], boxes[:, :2] + boxes[:, 2:]), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    shared = given.shared.resolve()
    labels = shared / "datasets" / "coco128" / "annotations" / "instances_train2017.json"
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (reference_ap, first) in REFERENCES.items():
            box, score = raw_differences(shared, name)
            detections = validate(shared, name, labels, Path(folder), given.device)
            ap = pycocotools_ap(labels, detections)
            share = share_with_partner(shared, name, first, labels, detections)
            print(f"{name}: raw outputs differ by {box:.1e} px and {score:.1e} in score")
            print(f"{name}: AP {ap:.4f}, reference {reference_ap:.4f}; {share:.2%} of its detections have a partner")
            if box >= BOX_PX or score >= SCORE or abs(ap - reference_ap) > AP or share < PARTNERS:
                failed.append(name)
    sys.exit(f"too far from the reference: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
