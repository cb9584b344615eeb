"""Mistakes in calls of the Python interface are one line, raised at the call."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch

from engine.inference.predictor import load
from tests.engine.inference.conftest import picture
from tests.helpers.messages import refused
from utils.errors import UserError


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("predict", r"call it, model\(images\)"),
        ("train", r"write lockstep.train\(DATA"),
        ("to", r'lockstep.load\(FILE, device="0"\)'),
        ("conf", r"model\(images, conf=0.4\)"),
        ("nothing", r"^a model has no attribute 'nothing'$"),
    ],
)
def test_attributes_of_other_programs_say_what_to_write(predictor, name, hint):
    with pytest.raises(AttributeError, match=hint):
        getattr(predictor, name)
    with pytest.raises(AttributeError, match=hint):
        setattr(predictor, name, 0.4)
    assert not hasattr(predictor, name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            np.zeros((4, 4, 3), np.uint8),
            "image0.jpg: the order of an array's colors is unknown; give color='bgr' (images from cv2) or color='rgb'",
        ),
        (np.zeros((2, 4, 4, 3), np.uint8), "image0.jpg: has shape (2, 4, 4, 3); expected (H, W) or (H, W, channels)"),
        (np.zeros((0, 4), np.uint8), "image0.jpg: an empty array of shape (0, 4)"),
        (
            np.zeros((4, 4, 2), np.uint8),
            "image0.jpg: 2 channels; expected 1 (gray), 3 (color), 4 (color and alpha), or the number of 'channels' in "
            "the YAML",
        ),
        (np.zeros((4, 4)), "image0.jpg: an array of float64; give uint8, from 0 to 255, or uint16"),
        (
            torch.full((3, 4, 4), 255.0),
            "image0.jpg: a float tensor with values outside [0, 1]; divide by 255, or give uint8",
        ),
        (
            torch.full((3, 4, 4), float("nan")),
            "image0.jpg: a float tensor with values outside [0, 1]; divide by 255, or give uint8",
        ),
        (torch.full((3, 4, 4), 0), "image0.jpg: a tensor of torch.int64; give uint8, uint16, or float in [0, 1]"),
        (
            torch.zeros(4, 4),
            "image0.jpg: a tensor of shape (4, 4); expected (C, H, W) or (B, C, H, W) with 1, 3 or 4 channels",
        ),
        ("nowhere.jpg", "nowhere.jpg: no such image"),
        (
            "https://example.com/a.jpg",
            "https://example.com/a.jpg: images are not downloaded; save it and give the path of the file",
        ),
        (".", ".: is a folder; give a list of files, or use stream() or detect.py"),
        ("clip.mp4", "clip.mp4: is a video; use stream(), which yields a result for each frame, or detect.py"),
        ("", ": is a folder; give a list of files, or use stream() or detect.py"),
        (["", "a.jpg"], ": is a folder; give a list of files, or use stream() or detect.py"),
        (7, "image0.jpg: int is not an image; give a path, numpy array, PIL image or torch tensor, ... list of these"),
        ([["a.jpg"]], "image0.jpg: list is not an image; give a path, numpy array, PIL image or ... one list of these"),
        (["nowhere.jpg", None], "nowhere.jpg: no such image"),
        (
            [np.zeros((4, 4), np.uint8), None],
            "image1.jpg: NoneType is not an image; give a path, numpy array, PIL image or ... one list of these",
        ),
    ],
)
def test_unusable_images_are_one_line(predictor, source, message):
    with refused(message):
        predictor(source)


@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 5000, 3), (5000, 1, 3), (3, 2), (2, 3, 4)])
def test_odd_shapes(predictor, shape):
    image = np.asfortranarray(np.random.default_rng(0).integers(0, 255, shape).astype(np.uint8))
    (result,) = predictor(image, color="bgr")
    assert result.orig_shape == shape[:2]
    assert torch.equal(result.boxes.data, predictor(np.ascontiguousarray(image), color="bgr")[0].boxes.data)
    assert (result.boxes.xyxy >= 0).all()
    assert (result.boxes.xyxy <= torch.tensor([shape[1], shape[0]] * 2)).all()
    assert result.plot().shape == (*shape[:2], 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"imgsz": 70}, "--imgsz 70: not a multiple of the model's stride 32; use 64 or 96"),
        ({"imgsz": (64, 64)}, "imgsz: must be a whole number, got [64, 64]"),
        ({"imgsz": 64.0}, "imgsz: must be a whole number, got 64.0"),
        ({"max_det": 0}, "max_det: must be at least 1, got 0"),
        ({"max_det": 10**9}, "max_det: must be at most 30000, got 1000000000"),
        ({"max_det": 2.5}, "max_det: must be a whole number, got 2.5"),
        ({"classes": [2]}, "--classes 2: the model has classes 0 to 1"),
        ({"classes": ["disk"]}, "--classes disk: the model has no class of this name (did you mean 'disc'?)"),
        ({"classes": ["x"]}, "--classes x: the model has no class of this name; its classes: disc, ring"),
        ({"classes": 2}, "--classes 2: the model has classes 0 to 1"),
        ({"classes": True}, "classes: must be a list of class numbers or names, got True"),
        ({"classes": [0.5]}, "classes: must be a list of class numbers or names, got [0.5]"),
        ({"stream": True}, "stream=True: unknown; model.stream(source) yields the results one by one"),
        ({"agnostic_nms": True}, "agnostic_nms=True: unknown (did you mean 'agnostic'?)"),
        ({"cnf": 0.1}, "cnf=0.1: unknown (did you mean 'conf'?)"),
        ({"batch_size": -1}, "batch_size: must be at least 0, got -1"),
        ({"device": 7}, "--device 7: there is no GPU 7; no CUDA GPU is available here; use --device cpu"),
        ({"color": "BGR"}, "color: must be 'rgb' or 'bgr', got 'BGR'"),
        ({"conf": 25}, "conf: must be at most 1, got 25"),
        ({"iou": -0.1}, "iou: must be at least 0, got -0.1"),
        ({"conf": "high"}, "conf: must be a number, got 'high'"),
    ],
)
def test_unfit_settings_are_one_line(weights, predictor, settings, message, monkeypatch):
    """All of them are settings of a call, and all but two also of `load`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refused(message):
        predictor(picture(), **{"color": "rgb"} | settings)
    if not {"batch_size", "color"} & set(settings):
        with refused(message):
            load(weights, **{"device": "cpu"} | settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("nowhere.pt",),
            "nowhere.pt: neither a file nor the name of public weights; public weights: yolox_nano, "
            "yolox_tiny, yolox_s, yolox_m, yolox_l, yolox_x, yolov9t, yolov9s, yolov9m, yolov9c, yolov5n, "
            "yolov5s, yolov5m, yolov5l, yolov5x, yolov5n6, yolov5s6, yolov5m6, yolov5l6, yolov5x6, yolov8n, "
            "yolov8s, yolov8m, yolov8l, yolov8x, yolo11n, yolo11s, yolo11m, yolo11l, yolo11x, yolo26n, "
            "yolo26s, yolo26m, yolo26l, yolo26x",
        ),
        (("",), "'': is not a path; give a checkpoint, an exported file, or the name of public weights"),
        ((None,), "None: is not a path; give a checkpoint, an exported file, or the name of public weights"),
        (("yolov12n.pt",), "yolov12n.pt: neither a file nor the name of public weights; public weights: ..."),
        (("yolov8nn",), "yolov8nn: neither a file nor the name of public weights (did you mean 'yolov8n'?)"),
        (("best.pt", "0,1"), "--device 0,1: there is no GPU 0; no CUDA GPU is available here; use --device cpu"),
    ],
)
def test_models_that_cannot_be_opened(arguments, monkeypatch, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path, device = (*arguments, "cpu")[:2]
    with refused(message):
        load(path, device=device)


def test_odd_sources_and_autocast_types_are_user_errors(predictor, weights, tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    cv2.imwrite(str(tmp_path / "a.png"), picture())
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:400])
    for source, message in (
        (pillow.new("RGB", (0, 10)), "image0.jpg: an empty image of 0x10 pixels"),
        (pillow.new("F", (8, 8)), "image0.jpg: PIL mode F has no defined range; convert it to L or RGB"),
        (pillow.open(tmp_path / "a.png"), "a.png: cannot be decoded (image file is truncated)"),
        (pillow.new("La", (4, 4)), "image0.jpg: PIL mode La cannot be converted to RGB; convert it first"),
    ):
        with refused(message):
            predictor(source)
    with refused("vid_stride 2: is for videos and streams; yield only every n-th image instead"):
        predictor.stream([np.zeros((64, 64, 3), np.uint8)], vid_stride=2, color="rgb")
    with refused("vid_stride: must be at least 1, got 0"):
        predictor.stream("clip.mp4", vid_stride=0)
    with refused("amp: must be one of auto, off, bf16, fp16, got 'bfloat16'"):
        load(weights, device="cpu", amp="bfloat16")


def test_mistakes_are_raised_at_the_call(predictor, tmp_path):
    (tmp_path / "empty").mkdir()
    for source, mistake in (("no.mp4", "no such file"), (tmp_path / "empty", "no image or video"), (7, "not found")):
        with pytest.raises(UserError, match=mistake):
            predictor.stream(source)
    for source in (picture(), None, 3.5):
        with pytest.raises(UserError, match=r"stream\(\) needs a video, a stream, a folder or an iterable of images"):
            predictor.stream(source)
    with pytest.raises(UserError, match=r"a{300}: file name too long$"):
        predictor.stream("a" * 300)
    for stride in (0, "2"):
        with pytest.raises(UserError, match="vid_stride: must be "):
            predictor.stream(tmp_path, vid_stride=stride)
    with pytest.raises(UserError, match=r"half=True: unknown; write lockstep.load\(FILE, amp=.fp16.\)"):
        predictor.stream(tmp_path, half=True)
