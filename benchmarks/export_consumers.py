"""Runs exported files in programs that others publish, and compares their AP with that of val.py.

    python -m venv consumers && consumers/bin/pip install openvino-model-api supervision onnxruntime
    python -m venv ultralytics && ultralytics/bin/pip install ultralytics sahi onnxruntime openvino
    python -m benchmarks.export_consumers --weights yolov8n.pt yolov5n.pt --data coco128.yaml \
        --python consumers/bin/python --ultralytics ultralytics/bin/python

Each consumer does its own preprocessing, decoding and NMS (`consumer_side.py`). Those that call this program's Python
interface (supervision and SAHI) need its requirements as well. pycocotools scores its detections, and the checkpoint's
on square canvases by the rules of the consumer: threshold, IoU of NMS, whether a box may have several classes (as in
val.py), and whole pixels. Exits with 1 if these two APs differ by more than 0.01. The third AP is that of val.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import torch

from benchmarks.coco_scores import average_precision
from benchmarks.consumer_side import frigate_boxes, letterbox, unletterbox
from benchmarks.dataset_copy import copied
from data.index.dataset_yaml import load_dataset_spec
from data.index.index import DatasetIndex, load_index
from engine.export.options import ExportOptions
from engine.export.parity import Reference, check_set
from engine.inference.runtimes.open import open_model
from utils.boxes import xyxy_to_cxcywh, xyxy_to_xywh
from utils.structures import GroundTruth

ROOT = Path(__file__).parents[1]
SIDE = Path(__file__).with_name("consumer_side.py")
AP = 0.01


class Consumer(NamedTuple):
    """How a consumer runs and what its rules are, for a comparison with our detections under the same rules."""

    name: str
    environment: str
    form: str
    confidence: float = 0.001
    layout: str = "raw"
    multi_label: bool = False  # a box may be a detection of several classes
    nms_iou: float | None = None  # None: that of the file
    whole_pixels: bool = False


CONSUMERS = (
    Consumer("onnxruntime", "python", "onnx"),
    Consumer("opencv", "python", "onnx"),
    Consumer("model_api", "python", "openvino", whole_pixels=True),
    Consumer("model_api", "python", "openvino", 0.25, whole_pixels=True),  # the file's threshold
    Consumer("supervision", "python", "onnx"),
    Consumer("frigate", "python", "onnx", 0.4, nms_iou=0.4),
    Consumer("deepstream", "python", "onnx", 0.25, "deepstream", nms_iou=0.45),
    Consumer("sahi_ours", "ultralytics", "onnx"),
    Consumer("sahi", "ultralytics", "onnx"),
    Consumer("ultralytics", "ultralytics", "onnx", multi_label=True),
    Consumer("ultralytics", "ultralytics", "openvino", multi_label=True),
    Consumer("ultralytics", "ultralytics", "onnx", layout="end2end", multi_label=True),
    Consumer("ultralytics", "ultralytics", "openvino", layout="end2end", multi_label=True),
)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.export_consumers", description=__doc__.split("\n")[0])
    parser.add_argument("--weights", nargs="+", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--python", default="", help="interpreter with the consumers")
    parser.add_argument("--ultralytics", default="", help="interpreter with ultralytics and sahi")
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--only", nargs="*", default=[], help="names of consumers")
    parser.add_argument("--folder", type=Path, help="keeps the files here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        with copied(args.data) as data:  # programs add caches to it
            worst = max(measure(weights, data, args, folder / weights.stem) for weights in args.weights)
    sys.exit(worst > AP)


def measure(weights: Path, data: Path, args: argparse.Namespace, folder: Path) -> float:
    """Prints a line for each consumer; returns the largest difference in AP from our detections by the same rules."""
    spec = load_dataset_spec(args.data)
    index = load_index(spec, "val", progress=False)
    truth, classes = index.ground_truth(), len(spec.names)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "images.json").write_text(json.dumps([index.path(i) for i in range(len(index))]))
    rows = our_predictions(weights, args, folder)
    ours = OurDetections(weights, index, args.imgsz)
    worst = 0.0
    for consumer in CONSUMERS:
        name, environment, form, confidence, layout, *_ = consumer
        python = getattr(args, environment)
        if not python or (args.only and name not in args.only):
            continue
        model = exported(weights, layout, args, folder)[form]
        found = folder / f"{name}-{layout}-{form}-{confidence}.json"
        command = [python, SIDE, name, model, folder / "images.json", found, str(confidence), data, ROOT]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        label = f"{weights.stem:10} {name:12} {layout:10} {form:8} {confidence:<6}"
        if done.returncode:
            print(f"{label} FAILED: {done.stderr.strip()[-600:]}", flush=True)
            worst = 1.0
            continue
        theirs = average_precision(found, truth, classes)
        same_rules = score(ours.rows(consumer), truth, classes)
        val = score([row for row in rows if row["score"] >= confidence], truth, classes)
        worst = max(worst, abs(theirs - same_rules))
        line = f"AP {theirs:.4f}; ours by its rules {same_rules:.4f} ({theirs - same_rules:+.4f}), val.py's {val:.4f}"
        print(f"{label} {line} ({theirs - val:+.4f})", flush=True)
    return worst


class OurDetections:
    """The checkpoint's detections on square canvases, by the rules of a consumer."""

    def __init__(self, weights: Path, index: DatasetIndex, imgsz: int) -> None:
        self.index, self.model = index, open_model(weights, device=torch.device("cpu"))
        options = ExportOptions(
            layout="raw",
            imgsz_hw=(imgsz, imgsz),
            batch=1,
            dynamic=False,
            half=False,
            int8=False,
            opset=18,
            nms_iou=self.model.nms_iou,
            box_voting=False,
        )
        self.images = check_set(index, len(index), options, self.model.stride)
        self.references: dict[tuple[bool, float | None], Reference] = {}

    def rows(self, consumer: Consumer) -> list[dict]:
        """Detections in COCO's format."""
        if consumer.name == "frigate":
            return list(self._frigate_rows())
        rules = consumer.multi_label, consumer.nms_iou or self.model.nms_iou
        if rules not in self.references:
            layout = "raw" if consumer.multi_label else "deepstream"  # decides about the classes of a box only
            self.references[rules] = Reference(
                self.model, self.images, layout=layout, nms_iou=rules[1], box_voting=False
            )
        table = self.references[rules].table
        boxes = table.boxes_xyxy_px.round() if consumer.whole_pixels else table.boxes_xyxy_px
        good = table.scores >= consumer.confidence
        columns = (table.image_index[good], table.classes[good], xyxy_to_xywh(boxes[good]), table.scores[good])
        return [
            {"file_name": self.index.path(image), "category_id": number, "bbox": box, "score": found}
            for image, number, box, found in zip(*(column.tolist() for column in columns))
        ]

    def _frigate_rows(self) -> Iterator[dict]:
        """Frigate's rules, whose NMS is like no other, on the checkpoint's boxes and scores."""
        for batch in self.images.batches:
            with torch.inference_mode():
                boxes, scores = self.model.decode(self.model(batch.images.float() / 255))
            outputs = torch.cat((xyxy_to_cxcywh(boxes), scores), -1).transpose(1, 2).numpy()
            for number, output in zip(batch.indices.tolist(), outputs):
                path, size = self.index.path(number), batch.images.shape[-1]
                image = cv2.imread(path)
                _, *geometry = letterbox(image, size)
                for kind, found, *fractions in frigate_boxes(output, size, size).tolist():
                    corners = np.array(fractions)[[1, 0, 3, 2]] * size
                    box = xyxy_to_xywh(unletterbox(corners, *geometry, image)).tolist()
                    yield {"file_name": path, "category_id": int(kind), "bbox": box, "score": found}


def our_predictions(weights: Path, args: argparse.Namespace, folder: Path) -> list[dict]:
    runs = folder / "runs"
    flags = ["--no-rect", "--imgsz", args.imgsz, "--device", "cpu", "--workers", "0", "--noplots", "--project", runs]
    run([sys.executable, "val.py", "--weights", weights, "--data", args.data, *flags])
    return json.loads(max(runs.glob("*/predictions.json"), key=lambda path: path.stat().st_mtime).read_text())


def exported(weights: Path, layout: str, args: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """The ONNX and OpenVINO files of a layout."""
    target = folder / layout / weights.name
    files = {"onnx": target.with_suffix(".onnx"), "openvino": target.with_name(f"{target.stem}_openvino_model")}
    if not all(path.exists() for path in files.values()):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(weights, target)
        flags = ["--imgsz", args.imgsz, "--data", args.data, "--layout", layout, "--format", *files]
        run([sys.executable, "export.py", "--weights", target, *flags])
    return {form: path.resolve() for form, path in files.items()}


def score(rows: list[dict], truth: GroundTruth, classes: int) -> float:
    """AP of detections in COCO's format."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(rows, file)
        file.flush()
        return average_precision(Path(file.name), truth, classes)


def run(command: list[object]) -> None:
    subprocess.run([str(part) for part in command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
