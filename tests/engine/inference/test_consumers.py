"""Programs that read Ultralytics' and YOLOv5's results read ours. They are the dependency group ``clients``, which
tests need not have: without a package its tests are skipped."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from engine.inference.hub import load_yolov5
from engine.inference.predictor import Predictor, load


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
        np.testing.assert_array_equal(detections.xyxy, result.boxes.xyxy)
        np.testing.assert_array_equal(detections.confidence, result.boxes.conf)
        np.testing.assert_array_equal(detections.class_id, result.boxes.cls)
        assert detections.data["class_name"].tolist() == [result.names[int(c)] for c in result.boxes.cls]
        assert detections.tracker_id is None
    assert len(supervision.Detections.from_ultralytics(predictor(image, conf=1.0)[0])) == 0


def test_supervision_draws_results(predictor, image):
    supervision = pytest.importorskip("supervision")
    (result,) = predictor(image)
    detections = supervision.Detections.from_ultralytics(result)
    for annotator in (supervision.BoxAnnotator(), supervision.LabelAnnotator(), supervision.TraceAnnotator()):
        if isinstance(annotator, supervision.TraceAnnotator):
            detections.tracker_id = np.arange(len(detections))
        assert annotator.annotate(image.copy(), detections).shape == image.shape


def test_supervision_slices_images_for_a_predictor(predictor, image):
    supervision = pytest.importorskip("supervision")
    shapes = []

    def detect(tile: np.ndarray):
        shapes.append(tile.shape)
        return supervision.Detections.from_ultralytics(predictor(tile)[0])

    detections = supervision.InferenceSlicer(callback=detect, slice_wh=(48, 48), overlap_wh=(8, 8))(image)
    assert len(shapes) > 1
    assert len(detections) > 0
    assert set(detections.data["class_name"]) <= set(predictor.names.values())
    assert (detections.xyxy >= 0).all()
    assert (detections.xyxy <= [image.shape[1], image.shape[0]] * 2).all()


def test_supervision_reads_results_of_torch_hub(weights, image):
    supervision = pytest.importorskip("supervision")
    results = load_yolov5(weights, device="cpu", conf=0.0, max_det=5)(image[..., ::-1])
    detections = supervision.Detections.from_yolov5(results)
    np.testing.assert_array_equal(detections.xyxy, results.xyxy[0][:, :4])
    np.testing.assert_array_equal(detections.class_id, results.xyxy[0][:, 5])


def test_masks_select_results(predictor, image):
    """Clients select by tensors, arrays and lists."""
    (result,) = predictor(image)
    expected = result.boxes.data[result.boxes.conf > float(result.boxes.conf[2])].tolist()
    mask = result.boxes.conf > result.boxes.conf[2]
    for index in (mask, mask.numpy(), mask.tolist(), [0, 1], np.array([0, 1]), slice(2)):
        assert result[index].boxes.data.tolist() == expected
        assert len(result[index]) == len(list(result[index])) == 2


def test_trackers_follow_results(predictor, image):
    supervision = pytest.importorskip("supervision")
    trackers = pytest.importorskip("trackers")
    tracker = trackers.ByteTrackTracker(track_activation_threshold=0.0, high_conf_det_threshold=0.0)
    for _ in range(3):
        detections = tracker.update(supervision.Detections.from_ultralytics(predictor(image, max_det=1)[0]))
    assert detections.tracker_id.tolist() == [0]


def test_fiftyone_converts_results(predictor, image):
    """Its conversion of Ultralytics' results; boxes are corner, width and height as fractions of the image."""
    pytest.importorskip("fiftyone")
    from fiftyone.utils.ultralytics import to_detections

    (result,) = predictor(image)
    detections = to_detections(result)
    assert [d.label for d in detections.detections] == [result.names[int(c)] for c in result.boxes.cls]
    np.testing.assert_allclose([d.confidence for d in detections.detections], result.boxes.conf, rtol=1e-6)
    boxes = np.array([d.bounding_box for d in detections.detections])
    corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1)
    np.testing.assert_allclose(corners, result.boxes.xyxyn, atol=1e-5)


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
