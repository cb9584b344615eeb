"""The Python interface of detection: kinds of images, batches, threads, memory, and what it refuses."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import pickle
import shutil
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch

import export
from engine.inference.detection_stream import DetectionStream
from engine.inference.frames import FileProblem, Frame
from engine.inference.image_detector import ImageDetector
from engine.inference.images import as_images
from engine.inference.predictor import Predictor, load
from engine.inference.results import Results
from tests.data.image_io.test_decode import jpeg_with_exif
from tests.engine.inference.conftest import picture
from tests.helpers.messages import refused
from tests.helpers.selection import select
from utils.errors import UserError
from utils.files.checkpoint_file import read_checkpoint, write_checkpoint
from utils.logger import configure_logging
from utils.machine.threads import ReadAheadLimit


@pytest.fixture(scope="module")
def predictor(weights) -> Predictor:
    return load(weights, device="cpu", conf=0.0, max_det=5)


def rows(results: list[Results]) -> list[list[list[float]]]:
    return [result.boxes.data.tolist() for result in results]


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


def test_a_model_shows_its_file_and_settings(predictor, weights):
    assert repr(predictor) == f"Predictor('{weights}', 2 classes, imgsz=64, conf=0, device='cpu')"
    assert repr(load(weights, device="cpu", imgsz=96, conf=0.123456)).endswith("imgsz=96, conf=0.123, device='cpu')")


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
        for got, want in zip(predictor(images, color="rgb", batch_size=size), alone):
            np.testing.assert_allclose(got.boxes.data.numpy(), np.array(want), atol=1e-3)
    stacked = torch.stack([torch.from_numpy(images[i]).permute(2, 0, 1) for i in (0, 2)])
    both = predictor([stacked, images[1]], color="rgb")
    assert rows(both) == [alone[0], alone[2], alone[1]]
    assert [r.path for r in both] == ["image0.jpg", "image1.jpg", "image2.jpg"]
    assert predictor([]) == []
    assert set(results[0].speed) == {"preprocess", "inference", "postprocess"}


def test_results_are_detections_in_float32(predictor):
    image = picture(37, 90)
    detector = predictor.image_detector
    settings = predictor.settings.resolve(predictor.model)
    ((table, _),) = detector.detect(detector.prepare([image], settings), settings)
    (result,) = predictor(image, color="rgb")
    np.testing.assert_array_equal(result.boxes.xyxy, np.float32(table.boxes_xyxy_px))
    np.testing.assert_array_equal(result.boxes.conf, np.float32(table.scores))
    np.testing.assert_array_equal(result.boxes.cls, table.classes)
    assert result.names == {0: "disc", 1: "ring"}


def test_without_box_voting_the_threshold_is_another_unless_one_is_chosen(weights, tmp_path):
    stored = {"progress": {"confidence": 0.5, "plain_confidence": 0.25}}
    write_checkpoint(read_checkpoint(weights) | stored, tmp_path / "a.pt")
    predictor = load(tmp_path / "a.pt", device="cpu", color="rgb")
    assert threshold(predictor) == 0.5
    assert threshold(load(tmp_path / "a.pt", device="cpu", box_voting=False)) == 0.25
    used = []
    predictor.image_detector.detect = lambda prepared, settings: used.append(settings.conf) or []
    for keywords in ({}, {"box_voting": False}, {"box_voting": False, "conf": 0.75}, {"iou": 0.6}):
        predictor(picture(), **keywords)
    for chosen in (0.125, 0.5):  # also if it happens to be the default
        predictor.settings = replace(predictor.settings, conf=chosen)
        predictor(picture(), box_voting=False)
    assert used == [0.5, 0.25, 0.75, 0.5, 0.125, 0.5]


def threshold(predictor):
    return predictor.settings.resolve(predictor.model).conf


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
        patch.setattr("models.postprocess.suppression.MIN_VOTING_SCORE", 0.0)  # the model is untrained
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


def test_streams_are_read_one_by_one(predictor, tmp_path):
    for i in range(4):
        cv2.imwrite(str(tmp_path / f"{i}.png"), picture(seed=i)[..., ::-1])
    stream = predictor.stream(tmp_path)
    first = next(stream)
    (tmp_path / "3.png").unlink()
    cv2.imwrite(str(tmp_path / "3.png"), picture(30, 30)[..., ::-1])  # not read before it is its turn
    later = list(stream)
    assert [first.path, *(r.path for r in later)] == [str(tmp_path / f"{i}.png") for i in range(4)]
    assert rows([first]) == rows(predictor(tmp_path / "0.png"))
    assert later[2].orig_shape == (30, 30)


@pytest.mark.parametrize("size", [1, 4])
def test_streams_are_processed_in_batches(weights, tmp_path, monkeypatch, capsys, size):
    """A damaged file has its place between the others. Of a batch that does not fit in memory, each image does."""
    configure_logging(True)
    own = load(weights, device="cpu", conf=0.0, max_det=5)
    for i in range(9):
        hw = ((30, 64), (64, 30), (30, 64))[i % 3]
        cv2.imwrite(str(tmp_path / f"{i}.png"), picture(*hw, seed=i)[..., ::-1])
    (tmp_path / "5.png").write_bytes(b"no image")
    expected = [rows(own(path))[0] for path in sorted(tmp_path.iterdir()) if path.stem != "5"]
    seen = []

    def note_size(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        (pixels,) = inputs
        seen.append(len(pixels))
        if len(pixels) == 3:
            raise MemoryError

    own.image_detector.model.register_forward_pre_hook(note_size)
    monkeypatch.setattr(own.image_detector, "images_at_once", lambda batch_size=0: size)
    results = list(own.stream(tmp_path))
    assert [Path(result.path).stem for result in results] == list("01234678")
    for got, want in zip(results, expected):
        np.testing.assert_allclose(got.boxes.data.numpy(), np.array(want), atol=1e-3)
    assert seen == ([1] * 8 if size == 1 else [3, 1, 1, 1, 1, 2, 2])
    line = f"{tmp_path / '5.png'}: cannot be decoded (damaged, or not an image); skipped"
    assert capsys.readouterr().out == f"warning: {line}\n"


def test_the_next_batch_is_prepared_while_the_model_runs(weights, tmp_path, monkeypatch):
    """Another thread prepares it, one batch ahead of the model, which waits for it here."""
    for i in range(5):
        cv2.imwrite(str(tmp_path / f"{i}.png"), picture(seed=i)[..., ::-1])
    own = load(weights, device="cpu", conf=0.0, max_det=5)
    expected = [rows(own(picture(seed=i), color="rgb"))[0] for i in range(5)]
    is_prepared = [threading.Event() for _ in range(5)]
    prepare = own.image_detector.prepare
    started = itertools.count()

    def noted(images, settings):
        number = next(i for i in range(5) if np.array_equal(images[0], picture(seed=i)))
        is_prepared[number].set()
        assert threading.current_thread() is not threading.main_thread()
        yield from prepare(images, settings)

    def wait_for_next(*_: object) -> None:
        assert is_prepared[min(next(started) + 1, 4)].wait(60)

    monkeypatch.setattr(own.image_detector, "prepare", noted)
    own.image_detector.model.register_forward_pre_hook(wait_for_next)
    assert rows(own.stream(tmp_path)) == expected
    assert next(started) == 5


def test_frames_of_a_live_stream_are_not_collected(predictor):
    """Each is processed before the next one is asked for, whatever the size of a batch of files."""
    asked = []

    def frames():
        for number in range(3):
            asked.append(number)
            yield Frame("rtsp://camera", picture(), number, 25.0, True, None, is_live=True)

    for number, detected in enumerate(stream_of(predictor, frames())):
        assert (detected.frame.index, asked) == (number, list(range(number + 1)))


def test_an_error_in_one_image_of_a_stream_is_raised_after_the_results_before_it(predictor, tmp_path, monkeypatch):
    for i in range(6):
        cv2.imwrite(str(tmp_path / f"{i}.png"), picture(seed=i)[..., ::-1])
    monkeypatch.setattr(predictor.image_detector, "images_at_once", lambda batch_size=0: 4)
    true = predictor.image_detector.prepare

    def prepare(images, *rest):
        if any(np.array_equal(image, picture(seed=2)) for image in images):
            raise UserError("does not fit")
        return true(images, *rest)

    monkeypatch.setattr(predictor.image_detector, "prepare", prepare)
    threads = set(threading.enumerate())
    stream = predictor.stream(tmp_path)
    assert [Path(next(stream).path).stem for _ in range(2)] == ["0", "1"]
    with refused("does not fit"):
        next(stream)
    assert set(threading.enumerate()) <= threads
    stream = predictor.stream(tmp_path)
    next(stream)
    del stream
    assert set(threading.enumerate()) <= threads


def boxes_elsewhere(predictor: Predictor, image: np.ndarray) -> list[list[list[float]]]:
    torch.set_num_threads(1)
    return rows(predictor(image, color="rgb"))


def test_outputs_that_are_not_numbers_are_reported_once(weights, tmp_path, caplog):
    content = read_checkpoint(weights)
    content["ema"] = {name: values * 1e30 for name, values in content["ema"].items()}
    write_checkpoint(content, tmp_path / "nan.pt")
    damaged = load(tmp_path / "nan.pt", device="cpu", color="rgb")
    assert [len(damaged(picture())[0].boxes) for _ in range(2)] == [0, 0]
    assert [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()] == [
        f"{tmp_path / 'nan.pt'}: its outputs are not numbers (NaN), so nothing is found; its weights are damaged, or "
        "too large for half precision: export without --half, or use --amp off"
    ]


def test_predictors_are_sent_to_other_processes(predictor, weights, tmp_path, monkeypatch):
    export.main(["--weights", str(shutil.copy(weights, tmp_path)), "--format", "torchscript", "--no-check"])
    monkeypatch.chdir(tmp_path)
    exported = load("best.torchscript", device="cpu", conf=0.0, max_det=5, trust=True)
    monkeypatch.chdir("/")
    image = picture(64, 64)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for model in (predictor, exported):
            np.testing.assert_allclose(
                pool.submit(boxes_elsewhere, model, image).result(60), rows(model(image, color="rgb")), atol=1e-3
            )


class FixedCanvas(torch.nn.Module):
    """A model that, as an exported file may, takes one canvas size and states the number of images it takes at once."""

    def __init__(self, model, input_hw):
        super().__init__()
        self.model = model
        self.input_hw = input_hw
        self.batch = 2
        self.seen = []
        self.canvases = partial(type(model).canvases, self)

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "model" else getattr(self.model, name)

    def forward(self, images):
        self.seen.append(tuple(images.shape))
        return self.model(images)


def test_a_fixed_canvas(weights, predictor):
    fixed = FixedCanvas(predictor.model, (32, 96))
    own = Predictor(fixed, conf=0.0, max_det=5, color="rgb")
    images = [picture(48, 64), picture(30, 200), picture(32, 96, seed=2)]
    results = own(images)
    assert fixed.seen == [(2, 3, 32, 96), (1, 3, 32, 96)]
    for image, result in zip(images, results):
        height, width = image.shape[:2]
        assert (result.boxes.xyxy >= 0).all()
        assert (result.boxes.xyxy <= torch.tensor([width, height] * 2)).all()
    with torch.no_grad():
        pixels = torch.from_numpy(images[2]).permute(2, 0, 1)[None].float() / 255
        boxes, scores = predictor.model.decode(predictor.model(pixels))
    rules = {"conf_thres": 0.0, "iou_thres": 0.45, "max_det": 5, "multi_label": False}
    expected = select(boxes, scores, **rules)
    np.testing.assert_allclose(results[2].boxes.conf, expected.scores[0], atol=1e-5)
    corners = expected.boxes_xyxy[0].clamp(min=0).minimum(torch.tensor([96.0, 32, 96, 32]))
    np.testing.assert_allclose(results[2].boxes.xyxy, corners, atol=1e-3)
    with refused("--imgsz 64: .../best.pt takes 32x96 pixels (height x width) only"):
        Predictor(fixed, imgsz=64)


def test_on_a_gpu_one_thread_runs_the_model(weights, monkeypatch):
    """Here with the GPU's thread for a model on the CPU. An error reaches the caller, and the thread goes on."""
    fake = SimpleNamespace(device=torch.device("cuda"))
    assert ImageDetector(fake, None)._thread is not None
    predictor = load(weights, device="cpu", conf=0.0, max_det=5)
    threads = set()
    pictures = [picture(seed=seed) for seed in range(20)]
    expected = [rows(predictor(image, color="rgb")) for image in pictures]
    predictor.image_detector._thread = ImageDetector(fake, None)._thread
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


def resident_mb() -> float:
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="Linux")
@pytest.mark.parametrize(("calls", "limit_mb"), [(250, 2.0), pytest.param(10_000, 4.0, marks=pytest.mark.slow)])
def test_memory_stays_flat(predictor, calls, limit_mb):
    """An image has 9 kB or more, a canvas 12 kB, the model's input 49 kB: one of them kept per call would show."""
    images = [picture(*hw, seed=i) for i, hw in enumerate([(48, 64), (64, 48), (64, 64), (50, 90)])]
    for _ in range(20):
        predictor(images, color="rgb")
    before = resident_mb()
    for number in range(calls):
        predictor(images[number % 4], color="rgb")
    grown = resident_mb() - before
    print(f"{calls} calls: {grown:.2f} MB")
    assert grown < limit_mb


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
        ({"max_det": 2.5}, "max_det: must be a whole number, got 2.5"),
        ({"classes": [2]}, "--classes 2: the model has classes 0 to 1"),
        ({"classes": ["disk"]}, "--classes disk: the model has no class of this name (did you mean 'disc'?)"),
        ({"classes": ["x"]}, "--classes x: the model has no class of this name; its classes: disc, ring"),
        ({"classes": 2}, "--classes 2: the model has classes 0 to 1"),
        ({"classes": True}, "classes: must be a list of class numbers or names, got True"),
        ({"classes": [0.5]}, "classes: must be a list of class numbers or names, got [0.5]"),
        ({"save": True}, "save=True: unknown; results have save()"),
        ({"stream": True}, "stream=True: unknown; model.stream(source) yields the results one by one"),
        ({"agnostic_nms": True}, "agnostic_nms=True: unknown (did you mean 'agnostic'?)"),
        ({"cnf": 0.1}, "cnf=0.1: unknown (did you mean 'conf'?)"),
        ({"batch_size": -1}, "batch_size: must be at least 0, got -1"),
        ({"device": 7}, "--device 7: there is no GPU 7; no CUDA GPU is available here; use --device cpu"),
        ({"color": "BGR"}, "color: must be 'rgb' or 'bgr', got 'BGR'"),
        ({"conf": 25}, "conf: must be at most 1, got 25.0"),
        ({"iou": -0.1}, "iou: must be at least 0, got -0.1"),
        ({"conf": "high"}, "conf: must be a number, got 'high'"),
    ],
)
def test_unfit_settings_are_one_line(weights, predictor, settings, message, monkeypatch):
    """They are those of a call, and but for two also of `load`."""
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
        (("yolov8nn",), "yolov8nn: neither a file nor the name of public weights (did you mean 'yolov8n'?)"),
        (("best.pt", "0,1"), "--device 0,1: there is no GPU 0; no CUDA GPU is available here; use --device cpu"),
    ],
)
def test_models_that_cannot_be_opened(arguments, monkeypatch, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path, device = (*arguments, "cpu")[:2]
    with refused(message):
        load(path, device=device)


def test_habits_that_change_nothing_are_accepted(predictor, weights, caplog):
    given = {"device": "cpu", "conf": 0.0, "max_det": 5}
    plain = predictor(picture(), color="rgb")
    half = load(weights, **given, amp="fp16", save=False)
    assert caplog.messages == ["float16 (--half, --amp fp16) is not supported on CPUs; computing in float32"]
    assert rows(half(picture(), color="rgb", stream=False, show=None)) == rows(plain)


def test_settings_may_be_numbers_of_numpy_and_torch(predictor):
    plain = rows(predictor(picture(), color="rgb", classes=[0], imgsz=64, max_det=3))
    for number, classes in ((np.int64, [np.int64(0)]), (torch.tensor, torch.tensor([0]))):
        given = {"classes": classes, "imgsz": int(number(64)), "max_det": number(3)}
        assert rows(predictor(picture(), color="rgb", **given)) == plain


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


def stream_of(predictor, items):
    return DetectionStream(
        items, predictor.image_detector, predictor.settings.resolve(predictor.model), ahead=ReadAheadLimit(4)
    )


def test_a_live_stream_ends_when_a_frame_of_it_has_failed(predictor):
    """Its later frames are not used, and it would not end by itself."""
    endless = (Frame("0", picture(), index=i, is_video=True, total=None, is_live=True) for i in itertools.count())
    with stream_of(predictor, endless) as stream:
        assert next(stream).frame.index == 0
        stream.skip("0")
        assert list(stream) == []


def test_what_goes_wrong_comes_at_its_place_among_the_frames(predictor):
    """One of several frames of a batch has no pixels. The source is closed in any case."""
    closed = []

    def items():
        try:
            for number in range(7):
                if number == 3:
                    yield FileProblem("3.png", "3.png: is damaged", is_skipped=True)
                shape = (0, 0, 3) if number == 5 else (32, 32, 3)
                yield Frame(f"{number}.png", np.zeros(shape, np.uint8))
            raise UserError("unplugged")
        finally:
            closed.append(True)

    threads = set(threading.enumerate())
    with stream_of(predictor, items()) as stream:
        seen = [next(stream) for _ in range(8)]
        with pytest.raises(UserError, match="unplugged"):
            next(stream)
    paths = [item.path if isinstance(item, FileProblem) else item.frame.path for item in seen]
    assert paths == ["0.png", "1.png", "2.png", "3.png", "3.png", "4.png", "5.png", "6.png"]
    assert isinstance(seen[3], FileProblem)
    failed = [not isinstance(item, FileProblem) and isinstance(item.outcome, Exception) for item in seen]
    assert failed == [False] * 6 + [True, False]
    assert closed == [True]
    assert set(threading.enumerate()) <= threads


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
    with pytest.raises(UserError, match=r"half=True: unknown; lockstep.load\(FILE, amp=.fp16.\)"):
        predictor.stream(tmp_path, half=True)


def test_images_have_the_same_names_in_a_stream_as_in_a_call(predictor, tmp_path):
    """PIL images of files have their names, others the number of the image."""
    image = pytest.importorskip("PIL.Image")
    image.fromarray(picture()).save(tmp_path / "a.png")
    sources = [picture(), image.open(tmp_path / "a.png"), torch.zeros(2, 3, 32, 32), image.fromarray(picture())]
    names = [result.path for result in predictor(sources, color="rgb")]
    assert names == ["image0.jpg", str(tmp_path / "a.png"), "image2.jpg", "image3.jpg", "image4.jpg"]
    assert [result.path for result in predictor.stream(iter(sources), color="rgb")] == names


def test_a_stream_takes_settings_and_iterables(predictor, tmp_path):
    images = [picture(seed=i) for i in range(3)]
    for number, image in enumerate(images):
        cv2.imwrite(str(tmp_path / f"{number}.png"), image[..., ::-1])
    expected = rows(predictor(images, color="rgb", max_det=2))
    for source in (tmp_path, iter(images), [tmp_path / "0.png", images[1], tmp_path / "2.png"]):
        assert rows(predictor.stream(source, color="rgb", max_det=2)) == expected
    assert list(predictor.stream([])) == []
