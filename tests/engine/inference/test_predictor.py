"""The Python interface of detection: kinds of images, batches, settings, threads, memory."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch

from engine.inference import detector as image_detector
from engine.inference.detector import model_thread
from engine.inference.hub import load_from_hub
from engine.inference.images import as_images
from engine.inference.predictor import load
from tests.engine.inference.conftest import picture, rows
from tests.helpers.exif import jpeg_with_exif
from utils.errors import UserError
from utils.files.torch_file import read_checkpoint, write_checkpoint


def test_every_kind_of_image_gives_the_same(predictor, tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    rgb = picture()
    path = tmp_path / "a.png"
    cv2.imwrite(str(path), rgb[..., ::-1])
    expected = rows(predictor(rgb, color="rgb"))
    assert len(expected[0]) == 5
    alpha = np.dstack([rgb, np.full(rgb.shape[:2], 7, np.uint8)])
    chw = torch.from_numpy(rgb).permute(2, 0, 1)
    kinds = {
        "str": predictor(str(path)),
        "Path": predictor(path),
        "bgr": predictor(np.ascontiguousarray(rgb[..., ::-1]), color="bgr"),
        "bgr view": predictor(rgb[..., ::-1], color="bgr"),
        "rgba": predictor(alpha, color="rgb"),
        "16 bits": predictor(rgb.astype(np.uint16) * 257, color="rgb"),
        "PIL": predictor(pillow.fromarray(rgb)),
        "PIL with alpha": predictor(pillow.fromarray(alpha)),
        "uint8 tensor": predictor(chw),
        "float tensor": predictor(chw.float() / 255),
        "float64 batch": predictor(chw.double()[None] / 255),
    }
    for kind, results in kinds.items():
        assert rows(results) == expected, kind
        assert np.array_equal(results[0].orig_img, rgb[..., ::-1]), kind
    assert kinds["Path"][0].path == str(path)
    assert kinds["bgr"][0].path == "image0.jpg"
    assert predictor(pillow.open(path))[0].path == str(path)
    gray = rgb[..., 0]
    expected = rows(predictor(np.repeat(gray[..., None], 3, 2), color="rgb"))
    deep = pillow.fromarray(gray.astype(np.uint16) * 257)
    for source in (gray, gray[..., None], pillow.fromarray(gray), torch.from_numpy(gray.copy())[None], deep):
        assert rows(predictor(source)) == expected  # needs no order of colors


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pil_images_are_turned_as_files_are(tmp_path, orientation):
    pillow = pytest.importorskip("PIL.Image")
    path = tmp_path / "a.jpg"
    path.write_bytes(jpeg_with_exif(picture(24, 40), orientation))
    (from_file,) = as_images(path, None)
    (from_pil,) = as_images(pillow.open(path), None)
    assert from_pil.image.shape == from_file.image.shape
    assert np.abs(from_pil.image.astype(int) - from_file.image).max() <= 6  # two decoders


def test_a_list_gives_a_result_per_image_in_order(predictor, tmp_path):
    shapes = [(48, 64), (64, 48), (48, 64), (20, 90), (64, 64), (64, 48)]
    images = [picture(*shape, seed=i) for i, shape in enumerate(shapes)]
    alone = [rows(predictor(image, color="rgb"))[0] for image in images]
    path = tmp_path / "b.png"
    cv2.imwrite(str(path), images[1][..., ::-1])
    mixed = [images[0], path, torch.from_numpy(images[2]).permute(2, 0, 1), *images[3:]]
    results = predictor(mixed, color="rgb")
    assert rows(results) == alone
    assert [r.path for r in results] == ["image0.jpg", str(path), *(f"image{i}.jpg" for i in range(2, 6))]
    assert [r.orig_shape for r in results] == shapes
    for size in (1, 2, 16):
        for actual, want in zip(predictor(images, color="rgb", batch_size=size), alone):
            np.testing.assert_allclose(actual.boxes.data.numpy(), np.array(want), atol=1e-3)
    stacked = torch.stack([torch.from_numpy(images[i]).permute(2, 0, 1) for i in (0, 2)])
    both = predictor([stacked, images[1]], color="rgb")
    assert rows(both) == [alone[0], alone[2], alone[1]]
    assert [r.path for r in both] == ["image0.jpg", "image1.jpg", "image2.jpg"]
    assert predictor([]) == []
    assert set(results[0].speed) == {"preprocess", "inference", "postprocess"}


def threshold(predictor):
    return predictor.settings.resolve(predictor.model).selection.conf_thres


def test_settings_of_load_of_the_object_and_of_a_call(weights, predictor, tmp_path, capsys, monkeypatch):
    image = picture()
    write_checkpoint(read_checkpoint(weights) | {"progress": {"confidence": 0.125}}, tmp_path / "a.pt")
    assert [threshold(load(tmp_path / "a.pt", device="cpu", conf=conf)) for conf in (None, 0.5)] == [0.125, 0.5]
    everything = predictor(image, color="rgb", max_det=300)[0].boxes
    middle = float(everything.conf.sort().values[len(everything) // 2])
    above = [row for row in everything.data.tolist() if row[4] > middle]
    assert 0 < len(above) < len(everything)
    assert rows(predictor(image, color="rgb", conf=middle, max_det=300)) == [above]
    other = load(weights, device="cpu", conf=0.0, color="rgb")
    other.settings = replace(other.settings, conf=middle)
    assert rows(other(image)) == [above]
    assert len(predictor(image, color="rgb")[0]) == 5  # the call has not changed the predictor
    by_number, by_name = (other(image, conf=0, classes=[c])[0].boxes for c in (1, "ring"))
    assert set(by_number.cls.tolist()) == {1.0}
    assert torch.equal(by_name.data, by_number.data)
    assert len(other(image, conf=0, iou=0, agnostic=True)[0]) < len(other(image, conf=0, iou=1)[0])
    assert rows(other(image, imgsz=96)) != rows(other(image))
    with monkeypatch.context() as patch:
        patch.setattr("models.postprocess.detections.MIN_VOTING_SCORE", 0.0)  # the model is untrained
        plain = other(image, iou=0.5, box_voting=False)[0].boxes
        raised = other(image, iou=0.5)[0].boxes
    assert raised.data.tolist() != plain.data.tolist()
    other.settings = replace(other.settings, box_voting=False)
    assert rows(other(image, iou=0.5)) == [plain.data.tolist()]
    again = load(weights, device="cpu", conf=middle, color="rgb", box_voting=False)
    assert rows(again(image, iou=0.5)) == rows(other(image, iou=0.5))
    assert rows(other(image, device="cpu", verbose=False)) == rows(other(image))
    assert capsys.readouterr().out == ""
    other(image, verbose=True)
    assert capsys.readouterr().out.startswith("image0.jpg: ")


def test_boxes_that_are_not_numbers_are_left_out(weights, caplog, monkeypatch):
    """JSON has no NaN. A box with infinite sides is clipped to the image."""
    damaged = load(weights, device="cpu", color="rgb", conf=0.0, max_det=5)
    scores = torch.tensor([[[0.9, 0.0], [0.8, 0.0], [0.7, 0.0]]])
    boxes = torch.tensor([[24.0, 24, 40, 40], [torch.nan, 24, 60, 60], [-torch.inf, 46, torch.inf, 56]])
    monkeypatch.setattr(damaged.model, "decode", lambda raw: (boxes[None], scores))
    image = np.zeros((64, 64, 3), np.uint8)  # 16 pixels from the edges of its canvas
    for _ in range(2):
        (result,) = damaged(image)
        assert result.boxes.xyxy.tolist() == [[8, 8, 24, 24], [0, 30, 64, 40]]
    assert [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()] == [
        f"{weights}: its outputs are not numbers (NaN), so some boxes are left out; its weights are damaged, or too "
        "large for half precision: export without --half, or use --amp off"
    ]


def test_on_a_gpu_one_thread_runs_the_model(weights, monkeypatch):
    """The test uses the GPU's thread for a model on the CPU. An error reaches the caller, and the thread continues."""
    threads = set()
    pictures = [picture(seed=seed) for seed in range(20)]
    settings = {"device": "cpu", "conf": 0.0, "max_det": 5}
    predictor = load(weights, **settings)
    expected = [rows(predictor(image, color="rgb")) for image in pictures]
    thread = model_thread(torch.device("cuda"))
    monkeypatch.setattr(image_detector, "model_thread", lambda device: thread)
    predictor = load(weights, **settings)
    decode = predictor.model.decode

    def noted(raw: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        threads.add(threading.get_ident())
        return decode(raw)

    monkeypatch.setattr(predictor.model, "decode", noted)
    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(lambda image: rows(predictor(image, color="rgb")), pictures)) == expected
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    monkeypatch.setattr(predictor.model, "decode", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        predictor(pictures[0], color="rgb")
    monkeypatch.undo()
    assert rows(predictor(pictures[0], color="rgb")) == expected[0]
    copy = pickle.loads(pickle.dumps(predictor))
    assert rows(copy(pictures[0], color="rgb")) == expected[0]


def test_eight_threads_give_the_bits_of_one(predictor):
    images = [picture(*hw, seed=i) for i, hw in enumerate([(48, 64), (64, 48), (64, 64), (20, 90)] * 16)]
    expected = [rows(predictor(image, color="rgb")) for image in images]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda image: rows(predictor(image, color="rgb")), images)) == expected


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("predict", r"call it, model\(images\)"),
        ("to", r'lockstep.load\(FILE, device="0"\)'),
        ("conf", r"model\(images, conf=0.4\)"),
        ("nothing", "nothing"),
    ],
)
def test_attributes_of_other_programs_say_what_to_write(predictor, name, hint):
    with pytest.raises(AttributeError, match=hint):
        getattr(predictor, name)
    with pytest.raises(AttributeError, match=hint):
        setattr(predictor, name, 0.4)


@pytest.mark.parametrize(
    "source",
    [
        np.zeros((4, 4, 3), np.uint8),  # of unknown color
        np.zeros((2, 4, 4, 3), np.uint8),
        np.zeros((4, 4)),
        torch.full((3, 4, 4), 255.0),
        torch.full((3, 4, 4), float("nan")),
        "nowhere.jpg",
        "clip.mp4",
        7,
        [np.zeros((4, 4), np.uint8), None],
    ],
)
def test_unusable_images_are_refused(predictor, source):
    with pytest.raises(UserError, match=r"^[^\n]+$"):
        predictor(source)


@pytest.mark.parametrize(
    ("name", "value"), [("cnof", 0), ("imgsz", 70), ("conf", 25), ("classes", [2]), ("device", 7), ("color", "BGR")]
)
def test_unfit_settings_are_refused(weights, predictor, name, value):
    """All are settings of a call, and all but one also of `load`."""
    with pytest.raises(UserError, match=rf"^(--)?{name}"):
        predictor(picture(), **{"color": "rgb", name: value})
    if name not in ("batch_size", "color"):
        with pytest.raises(UserError, match=rf"^(--)?{name}"):
            load(weights, **{"device": "cpu", name: value})


@pytest.mark.parametrize("stored", [{"confidence": 0.5}, {}])
def test_another_size_than_that_of_the_threshold_is_warned_of_once(weights, tmp_path, caplog, stored):
    write_checkpoint(read_checkpoint(weights) | {"progress": stored}, tmp_path / "a.pt")
    for opened in (load(tmp_path / "a.pt", device="cpu"), load_from_hub(tmp_path / "a.pt", device="cpu")):
        caplog.clear()
        for size in (64, 96, 96):
            opened(picture(), color="rgb", imgsz=size)
            opened(picture(), color="rgb", imgsz=size, conf=0.3)
        assert len(caplog.messages) == len(stored)
        assert all("64" in message and "96" in message for message in caplog.messages)
