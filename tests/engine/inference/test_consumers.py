"""Programs that read Ultralytics' and YOLOv5's results read ours. They are the dependency group ``clients``, which
tests need not have: without a package its tests are skipped."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from engine.inference.hub import load_from_hub
from engine.inference.predict import Predictor, load
from engine.inference.results import Boxes, Results


@pytest.fixture
def predictor(weights) -> Predictor:
    return load(weights, device="cpu", conf=0.0, max_det=5, color="bgr")


@pytest.fixture(scope="module")
def image() -> np.ndarray:
    """BGR."""
    return cv2.resize(np.random.default_rng(0).integers(0, 255, (8, 8, 3)).astype(np.uint8), (90, 60))


def test_supervision_reads_results(predictor, image):
    supervision = pytest.importorskip("supervision")
    (result,) = predictor(image)
    for given in (result, result.numpy()):
        detections = supervision.Detections.from_ultralytics(given)
        columns = [detections.xyxy, detections.confidence[:, None], detections.class_id[:, None]]
        np.testing.assert_array_equal(np.concatenate(columns, 1), result.boxes.data)
        assert detections.data["class_name"].tolist() == [result.names[int(c)] for c in result.boxes.cls]
        assert detections.tracker_id is None
    tracked = Results(result.frame, result.names, Boxes(np.insert(result.boxes.array, 4, 7, 1), (60, 90)), {})
    assert supervision.Detections.from_ultralytics(tracked).tracker_id.tolist() == [7] * 5
    assert len(supervision.Detections.from_ultralytics(predictor(image, conf=1.0)[0])) == 0


def test_supervision_slices_images_for_a_predictor(predictor, image):
    supervision = pytest.importorskip("supervision")

    def detect(tile: np.ndarray):
        return supervision.Detections.from_ultralytics(predictor(tile)[0])

    detections = supervision.InferenceSlicer(callback=detect, slice_wh=(48, 48), overlap_wh=(8, 8))(image)
    assert (detections.xyxy.max(0)[2:] > 48).all()  # in more than one slice
    assert set(detections.data["class_name"]) <= set(predictor.names.values())


def test_supervision_reads_results_of_torch_hub(weights, image):
    supervision = pytest.importorskip("supervision")
    results = load_from_hub(weights, device="cpu", conf=0.0, max_det=5)(image[..., ::-1])
    detections = supervision.Detections.from_yolov5(results)
    np.testing.assert_array_equal(detections.xyxy, results.xyxy[0][:, :4])
    np.testing.assert_array_equal(detections.class_id, results.xyxy[0][:, 5])


def test_sahi_slices_images_for_a_predictor(predictor, image, tmp_path, monkeypatch):
    sahi = pytest.importorskip("sahi")
    predict = pytest.importorskip("sahi.predict")
    (tmp_path / "ultralytics").mkdir()
    (tmp_path / "ultralytics" / "__init__.py").touch()  # SAHI asks whether it is installed, and does not import it
    monkeypatch.syspath_prepend(str(tmp_path))
    model = sahi.AutoDetectionModel.from_pretrained(
        model_type="ultralytics", model=predictor, confidence_threshold=0.0, device="cpu", image_size=96
    )
    path = tmp_path / "a.png"
    cv2.imwrite(str(path), image)
    detections = predict.get_prediction(str(path), model).object_prediction_list
    (result,) = predictor(path, imgsz=96)
    assert len(detections) == 5
    assert [o.category.name for o in detections] == [result.names[int(c)] for c in result.boxes.cls]
    np.testing.assert_allclose([o.bbox.to_xyxy() for o in detections], result.boxes.xyxy, atol=1e-4)
    sliced = predict.get_sliced_prediction(str(path), model, slice_height=32, slice_width=48, verbose=0)
    assert len(sliced.object_prediction_list) > 0
