"""Other programs' readers of exported files, each with its own preprocessing and decoding. Nothing of this program is
imported, except by the two that call its Python interface.

    python consumer_side.py CONSUMER MODEL IMAGES.json FOUND.json CONFIDENCE DATA.yaml REPOSITORY

writes the detections of all images in COCO's format, with ``file_name``. "frigate" and "deepstream" are not the
programs: they decode as these programs' documentation and configuration files say.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import cv2
import numpy as np

Found = tuple[np.ndarray, np.ndarray, np.ndarray]  # boxes (D, 4) xyxy, scores (D,), classes (D,)
Detect = Callable[[str], Found]
FRIGATE_SCORE, FRIGATE_IOU, FRIGATE_MOST = 0.4, 0.4, 20
DEEPSTREAM_IOU = 0.45


def documented_code(repository: Path) -> str:
    """The block of docs/export.md that runs an ONNX file with onnxruntime."""
    blocks = re.findall(r"```python\n(.*?)```", (repository / "docs" / "export.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "onnxruntime.InferenceSession" in block]
    return code


def onnxruntime_reader(model: Path, confidence: float, repository: Path) -> Detect:
    """The code of docs/export.md with the file's name and the threshold replaced."""
    namespace: dict = {}
    exec(documented_code(repository).replace('"best.onnx"', repr(str(model))), namespace)
    return lambda path: namespace["detect"](path, confidence)


def letterbox(image: np.ndarray, size: int) -> tuple[np.ndarray, float, int, int]:
    """A square canvas with the image in its center; the scale and the padding on the left and at the top."""
    gain = size / max(image.shape[:2])
    height, width = round(image.shape[0] * gain), round(image.shape[1] * gain)
    top, left = (size - height) // 2, (size - width) // 2
    canvas = np.full((size, size, 3), 114, np.uint8)
    canvas[top : top + height, left : left + width] = cv2.resize(image, (width, height))
    return canvas, gain, left, top


def unletterbox(boxes: np.ndarray, gain: float, left: int, top: int, image: np.ndarray) -> np.ndarray:
    """Boxes (D, 4) xyxy from the canvas to the image, clipped."""
    height, width = image.shape[:2]
    return ((boxes - (left, top, left, top)) / gain).clip(0, (width, height, width, height))


def opencv_reader(model: Path, confidence: float) -> Detect:
    """OpenCV's network, its preprocessing for ONNX (`blobFromImageWithParams`) and its NMS."""
    net = cv2.dnn.readNetFromONNX(str(model))
    params = cv2.dnn.Image2BlobParams()
    params.scalefactor = (1 / 255,) * 4
    params.size = (640, 640)
    params.swapRB = True
    params.paddingmode = cv2.dnn.DNN_PMODE_LETTERBOX
    params.borderValue = (114,) * 4

    def detect(path: str) -> Found:
        image = cv2.imread(path)
        net.setInput(cv2.dnn.blobFromImageWithParams(image, params))
        output = np.squeeze(net.forward())
        boxes, scores, classes = best_classes(output)
        good = scores > confidence
        corner = np.concatenate((boxes[good, :2] - boxes[good, 2:] / 2, boxes[good, 2:]), 1)
        keep = np.array(cv2.dnn.NMSBoxesBatched(corner, scores[good], classes[good], confidence, 0.7), int)
        _, gain, left, top = letterbox(image, 640)  # OpenCV's blobRectsToImageRects rounds to whole pixels, twice
        rects = np.concatenate((corner[:, :2], corner[:, :2] + corner[:, 2:]), 1)[keep]
        return unletterbox(rects, gain, left, top, image), scores[good][keep], classes[good][keep]

    return detect


def best_classes(output: np.ndarray) -> Found:
    """Layout raw (4 + C, N) to cx, cy, w, h (N, 4), the best score and its class."""
    return output[:4].T, output[4:].max(0), output[4:].argmax(0)


def model_api_reader(model: Path, confidence: float) -> Detect:
    """Intel's Model API, which learns everything from the file; the threshold too, if it is that of the file."""
    from model_api.models import DetectionModel

    configuration = {} if confidence == 0.25 else {"confidence_threshold": confidence}
    (xml,) = model.glob("*.xml")
    detector = DetectionModel.create_model(str(xml), configuration=configuration, device="CPU")

    def detect(path: str) -> Found:
        result = detector(cv2.imread(path))
        return result.bboxes.astype(float), result.scores, result.labels

    return detect


def supervision_reader(model: Path, confidence: float, repository: Path) -> Detect:
    """`supervision.Detections.from_ultralytics` of this program's results."""
    sys.path.insert(0, str(repository))
    import supervision

    from engine.inference.predictor import load

    predictor = load(model, device="cpu", conf=confidence)
    predictor.iou, predictor.box_voting = predictor.model.nms_iou, False  # as the other consumers

    def detect(path: str) -> Found:
        found = supervision.Detections.from_ultralytics(predictor(path)[0])
        assert [predictor.names[c] for c in found.class_id] == list(found.data["class_name"])
        return found.xyxy, found.confidence, found.class_id

    return detect


def sahi_reader(model: Path, confidence: float, predictor: object = None) -> Detect:
    """SAHI's wrapper of ultralytics, without slices: around an exported file, or around this program's predictor."""
    from sahi import AutoDetectionModel
    from sahi.predict import get_prediction

    source = {"model": predictor} if predictor else {"model_path": str(model)}
    detector = AutoDetectionModel.from_pretrained(
        "ultralytics", confidence_threshold=confidence, device="cpu", image_size=640, **source
    )

    def detect(path: str) -> Found:
        objects = get_prediction(path, detector, verbose=0).object_prediction_list
        boxes = np.array([o.bbox.to_xyxy() for o in objects], np.float64).reshape(-1, 4)
        return boxes, np.array([o.score.value for o in objects]), np.array([o.category.id for o in objects])

    return detect


def our_predictor(model: Path, confidence: float, repository: Path) -> object:
    sys.path.insert(0, str(repository))
    from engine.inference.predictor import load

    predictor = load(model, device="cpu", conf=confidence, color="bgr")
    predictor.iou, predictor.box_voting = predictor.model.nms_iou, False  # as the other consumers
    return predictor


def frigate_boxes(output: np.ndarray, width: int, height: int) -> np.ndarray:
    """Frigate's model type yolo-generic: at most 20 rows of class, score, y1, x1, y2, x2 in fractions of the canvas.

    The output is turned so that the boxes are its rows. The largest of the columns from 4 on is the score, its number
    the class. Scores above 0.4 go through OpenCV's NMS at 0.4, regardless of the class; Frigate gives it corners where
    it expects width and height.
    """
    rows = np.squeeze(output)
    rows = rows.T if rows.shape[0] < rows.shape[1] else rows
    boxes, scores, classes = best_classes(rows.T)
    good = scores > FRIGATE_SCORE
    corners = np.concatenate((boxes[good, :2] - boxes[good, 2:] / 2, boxes[good, :2] + boxes[good, 2:] / 2), 1)
    keep = cv2.dnn.NMSBoxes(corners, scores[good], FRIGATE_SCORE, FRIGATE_IOU)
    keep = np.array(keep, int).ravel()[:FRIGATE_MOST]
    fractions = corners[keep][:, [1, 0, 3, 2]] / (height, width, height, width)
    return np.concatenate((classes[good][keep, None], scores[good][keep, None], fractions), 1)


def deepstream_boxes(output: np.ndarray, width: int, height: int, threshold: float) -> Found:
    """DeepStream-Yolo's parser on rows x1, y1, x2, y2, score, class (N, 6): rows below the threshold are dropped,
    corners clipped to the canvas, boxes thinner than a pixel dropped. DeepStream's clustering follows: NMS by class at
    0.45, and the 300 best."""
    rows = output[output[:, 4] >= threshold]
    boxes = rows[:, :4].clip(0, (width, height, width, height))
    large = ((boxes[:, 2:] - boxes[:, :2]) >= 1).all(1)
    boxes, scores, classes = boxes[large], rows[large, 4], rows[large, 5].astype(int)
    sides = np.concatenate((boxes[:, :2], boxes[:, 2:] - boxes[:, :2]), 1)
    keep = np.array(cv2.dnn.NMSBoxesBatched(sides, scores, classes, threshold, DEEPSTREAM_IOU), int)[:300]
    return boxes[keep], scores[keep], classes[keep]


def rules_reader(model: Path, confidence: float, rules: str) -> Detect:
    """The rules of "frigate" or "deepstream" on the output of onnxruntime for a letterboxed image."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(model))
    size = session.get_inputs()[0].shape[2]

    def detect(path: str) -> Found:
        image = cv2.imread(path)
        canvas, gain, left, top = letterbox(image, size)
        pixels = np.ascontiguousarray(canvas[..., ::-1].transpose(2, 0, 1)[None], np.float32) / 255
        output = session.run(None, {"images": pixels})[0]
        if rules == "frigate":
            rows = frigate_boxes(output, size, size)
            boxes, scores, classes = rows[:, [3, 2, 5, 4]] * size, rows[:, 1], rows[:, 0].astype(int)
        else:
            boxes, scores, classes = deepstream_boxes(output[0], size, size, confidence)
        return unletterbox(boxes, gain, left, top, image), scores, classes

    return detect


def ultralytics_rows(model: Path, data: Path, confidence: float) -> list[dict]:
    """Ultralytics' validation as a black box: the predictions.json that it writes."""
    from ultralytics import YOLO

    folder = Path.cwd() / "ultralytics_runs"
    metrics = YOLO(str(model), task="detect").val(
        data=str(data), save_json=True, plots=False, conf=confidence, imgsz=640, device="cpu", project=str(folder)
    )
    print(f"its own AP: {metrics.box.map:.4f}", file=sys.stderr)
    newest = max(folder.rglob("predictions.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(newest.read_text())


def coco_rows(detect: Detect, paths: list[str]) -> Iterator[dict]:
    for path in paths:
        for box, score, number in zip(*detect(path), strict=True):
            x1, y1, x2, y2 = map(float, box)
            yield {
                "file_name": Path(path).name,
                "category_id": int(number),
                "bbox": [x1, y1, x2 - x1, y2 - y1],
                "score": float(score),
            }


def main(consumer: str, model: str, images: str, found: str, confidence: str, data: str, repository: str) -> None:
    path, threshold, root = Path(model), float(confidence), Path(repository)
    if consumer == "ultralytics":
        rows = ultralytics_rows(path, Path(data), threshold)
    else:
        readers: dict[str, Callable[[], Detect]] = {
            "onnxruntime": lambda: onnxruntime_reader(path, threshold, root),
            "opencv": lambda: opencv_reader(path, threshold),
            "model_api": lambda: model_api_reader(path, threshold),
            "supervision": lambda: supervision_reader(path, threshold, root),
            "sahi": lambda: sahi_reader(path, threshold),
            "sahi_ours": lambda: sahi_reader(path, threshold, our_predictor(path, threshold, root)),
            "frigate": lambda: rules_reader(path, threshold, "frigate"),
            "deepstream": lambda: rules_reader(path, threshold, "deepstream"),
        }
        rows = list(coco_rows(readers[consumer](), json.loads(Path(images).read_text())))
    Path(found).write_text(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
