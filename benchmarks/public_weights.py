"""Compares the outputs of public YOLOv8 and YOLOv5 weights in this program with those of their original programs.

    python -m benchmarks.public_weights --shared ../shared

``--shared`` contains weights/yolov8n.pt and yolov5n.pt, the reference outputs in golden/ (its README says how they
were made) and datasets/coco128. For each model, the raw outputs for one image must agree to 5e-3 pixels and 1e-4 in
score. Then ``val.py --no-box-voting`` runs on coco128 with its JSON labels, at 640 px in batches of 16, with the
images in the reference's order. AP by pycocotools must equal the reference's within 0.002, and at least 99 % of the
reference's detections with a score above 0.1 must have a counterpart of the same class, with an IoU above 0.98 and a
score within 0.005. Exits with 1 if anything fails.

Two errors of yolov5n's reference are taken into account. Its file has no detections for seven of the 128 images
(although they were in its batches), so our AP leaves them out too. And it maps boxes back with the padding before
rounding, half a pixel off where the padding is odd, and with the gain of the height for both axes; its boxes are
corrected before counterparts are searched. The figures without these corrections are printed as well.
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

from data.render.opencv import fit_letterbox
from data.sampler import validation_requests
from models.weights.load import load_detector
from utils.boxes import clip_xyxy, iou, letterbox_to_original, xywh_to_xyxy, xyxy_to_cxcywh, xyxy_to_xywh

ROOT = Path(__file__).parents[1]
IMGSZ, BATCH, STRIDE, PAD = 640, 16, 32, 0.5
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
    if detector.head.anchors is not None:
        expected, objectness, classes = reference.split((4, 1, 80), -1)
        expected_scores = objectness * classes
    else:
        expected, expected_scores = reference.transpose(1, 2).split((4, 80), -1)
    return float((xyxy_to_cxcywh(boxes) - expected).abs().max()), float((scores - expected_scores).abs().max())


def read_reference(shared: Path, name: str) -> list[dict]:
    with gzip.open(shared / "golden" / f"{name}_coco128_predictions.json.gz") as file:
        return json.load(file)


def lay_out(shared: Path, coco: dict, order: list[int], folder: Path) -> Path:
    """A data set of the images (by id) under names that sort in this order; its data YAML.

    Batches of rectangular canvases are cut from the images in order of aspect, and a canvas fits the images it is
    shared with. Of equal aspects the reference has an order of its own (an unstable sort), ours that of the names:
    with the same order both see each image on the same canvas.
    """
    folder.mkdir()
    by_id = {image["id"]: image for image in coco["images"]}
    images = []
    for position, image_id in enumerate(order):
        source = next((shared / "datasets" / "coco128").rglob(by_id[image_id]["file_name"]))
        target = folder / f"{position:03d}{source.suffix}"
        target.symlink_to(source.resolve())
        images.append(by_id[image_id] | {"file_name": target.name})
    (folder / "labels.json").write_text(json.dumps(coco | {"images": images}))
    data = {
        "path": str(folder),
        "train": ".",
        "val": ".",
        "names": yaml.safe_load((shared / "datasets" / "coco128" / "coco128.yaml").read_text())["names"],
        "annotations": {"val": str(folder / "labels.json")},
    }
    (folder / "data.yaml").write_text(yaml.safe_dump(data))
    return folder / "data.yaml"


def put_right(reference: list[dict], coco: dict, order: list[int]) -> list[dict]:
    """yolov5n's reference detections, mapped back from the canvas correctly."""
    by_id = {image["id"]: image for image in coco["images"]}
    image_hw = np.array([(by_id[i]["height"], by_id[i]["width"]) for i in order])
    canvases = {}
    options = {"batch_size": BATCH, "imgsz": IMGSZ, "stride": STRIDE, "rect": True, "pad": PAD}
    for request in validation_requests(image_hw, **options):
        members, canvas = np.array([key.index for key in request.keys]), request.canvas_hw
        canvases |= {order[i]: canvas for i in members}
    mapped = []
    for found in reference:
        image, (canvas_h, canvas_w) = by_id[found["image_id"]], canvases[found["image_id"]]
        fit = fit_letterbox((image["height"], image["width"]), (canvas_h, canvas_w), IMGSZ)
        odd_pads = torch.tensor([(canvas_w - fit.width) / 2, (canvas_h - fit.height) / 2] * 2, dtype=torch.float64)
        on_canvas = _corners([found["bbox"]]) * fit.gain_y + odd_pads
        boxes = letterbox_to_original(on_canvas, fit.gain_x, fit.gain_y, fit.pad_x, fit.pad_y)
        inside = clip_xyxy(boxes, image["width"], image["height"])
        mapped.append(found | {"bbox": xyxy_to_xywh(inside)[0].tolist()})
    return mapped


def validate(shared: Path, name: str, data: Path, folder: Path, device: str) -> list[dict]:
    """The predictions that ``val.py`` writes."""
    command = [sys.executable, "val.py", "--weights", shared / "weights" / f"{name}.pt", "--data", data]
    command += ["--imgsz", IMGSZ, "--batch-size", BATCH, "--device", device, "--noplots", "--no-verbose"]
    command += ["--no-box-voting"]  # the references have none
    command += ["--project", folder, "--name", f"{name}-found"]
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True)
    return json.loads((folder / f"{name}-found" / "predictions.json").read_text())


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


def share_with_partner(reference: list[dict], first: int, coco: dict, detections: list[dict]) -> float:
    """The fraction of the reference detections with a score above 0.1 that have a counterpart in ours."""
    categories = sorted(category["id"] for category in coco["categories"])
    reference = [d for d in reference if d["score"] > 0.1]
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
    return xywh_to_xyxy(torch.tensor(xywh, dtype=torch.float64))


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.public_weights", description=__doc__.split("\n")[0])
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    shared = given.shared.resolve()
    labels = shared / "datasets" / "coco128" / "annotations" / "instances_train2017.json"
    coco = json.loads(labels.read_text())
    order = list(dict.fromkeys(d["image_id"] for d in read_reference(shared, "yolov8n")))
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        data = lay_out(shared, coco, order, Path(folder) / "images")
        for name, (reference_ap, first) in REFERENCES.items():
            box, score = raw_differences(shared, name)
            detections = validate(shared, name, data, Path(folder), given.device)
            reference = read_reference(shared, name)
            ap = pycocotools_ap(labels, detections)
            share = share_with_partner(reference, first, coco, detections)
            print(f"{name}: raw outputs differ by {box:.1e} px and {score:.1e} in score")
            print(f"{name}: AP {ap:.4f}, reference {reference_ap:.4f}; {share:.2%} of its detections have a partner")
            if name == "yolov5n":
                there = {d["image_id"] for d in reference}
                ap = pycocotools_ap(labels, [d for d in detections if d["image_id"] in there])
                share = share_with_partner(put_right(reference, coco, order), first, coco, detections)
                print(
                    f"{name}: on its {len(there)} images AP {ap:.4f}; its boxes put right, {share:.2%} have a partner"
                )
            if box >= BOX_PX or score >= SCORE or abs(ap - reference_ap) > AP or share < PARTNERS:
                failed.append(name)
    sys.exit(f"too far from the reference: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
