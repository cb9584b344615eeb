"""Detection from Python: kinds of images, batches, streams, settings, threads."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from engine.inference.hub import load_from_hub
from engine.inference.images import frames_of
from engine.inference.predict import Predictor, load
from tests.engine.inference.conftest import picture, rows
from tests.helpers.exif import jpeg_with_exif
from utils.errors import UserError
from utils.files.torch_file import read_checkpoint, write_checkpoint
from utils.logger import configure_logging


def test_every_kind_of_image_gives_the_same(predictor, tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    rgb = picture()
    path = tmp_path / "a.png"
    cv2.imwrite(str(path), rgb[..., ::-1])
    expected = rows(predictor(rgb, color="rgb"))
    assert len(expected[0]) == 5
    alpha = np.dstack([rgb, np.full(rgb.shape[:2], 7, np.uint8)])
    chw = torch.from_numpy(rgb).permute(2, 0, 1)
    for source in (path, pillow.fromarray(alpha), chw, chw.double()[None] / 255):
        (result,) = predictor(source)
        assert rows([result]) == expected
        assert np.array_equal(result.orig_img, rgb[..., ::-1])
        assert result.path == (str(path) if source is path else "image0.jpg")
    for array, color in ((rgb[..., ::-1], "bgr"), (alpha, "rgb"), (rgb.astype(np.uint16) * 257, "rgb")):
        assert rows(predictor(array, color=color)) == expected
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
    from_file, from_pil = frames_of([path, pillow.open(path)], None)
    assert from_pil.image.shape == from_file.image.shape
    assert np.abs(from_pil.image.astype(int) - from_file.image).max() <= 6  # two decoders


@pytest.mark.parametrize("size", [1, 16])
def test_lists_and_streams_give_a_result_for_each_image_in_order(predictor, tmp_path, monkeypatch, capsys, size):
    """A damaged file of a stream is left out with a warning."""
    configure_logging(True)
    shapes = [(48, 64), (64, 48), (48, 64), (20, 90), (64, 64), (64, 48)]
    images = [picture(*shape, seed=i) for i, shape in enumerate(shapes)]
    alone = [rows(predictor(image, color="rgb"))[0] for image in images]
    for number, image in enumerate(images):
        cv2.imwrite(str(tmp_path / f"{number}.png"), image[..., ::-1])
    (tmp_path / "2b.png").write_bytes(b"no image")
    monkeypatch.setattr(Predictor, "images_at_once", size)
    mixed = [images[0], tmp_path / "1.png", torch.from_numpy(images[2]).permute(2, 0, 1), *images[3:]]
    results = predictor(mixed, color="rgb")
    assert [r.path for r in results] == ["image0.jpg", str(tmp_path / "1.png"), *(f"image{i}.jpg" for i in range(2, 6))]
    streamed = list(predictor.stream(tmp_path))
    assert [Path(r.path).stem for r in streamed] == list("012345")
    for found in (results, streamed, list(predictor.stream(iter(mixed), color="rgb"))):
        assert [r.orig_shape for r in found] == shapes
        for actual, expected in zip(rows(found), alone, strict=True):
            np.testing.assert_allclose(actual, expected, atol=0 if size == 1 else 1e-3)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"warning: {tmp_path / '2b.png'}: ")
    stacked = torch.stack([torch.from_numpy(images[i]).permute(2, 0, 1) for i in (0, 2)])
    assert [len(predictor(source)) for source in ([], [stacked, images[1][..., :1]])] == [0, 3]


def test_settings_of_load_of_the_object_and_of_a_call(weights, predictor, tmp_path):
    image = picture()
    everything = predictor(image, color="rgb", max_det=300)[0].boxes
    middle = float(everything.conf.sort().values[len(everything) // 2])
    above = [row for row in everything.data.tolist() if row[4] > middle]
    write_checkpoint(read_checkpoint(weights) | {"progress": {"confidence": middle}}, tmp_path / "a.pt")
    other = load(weights, device="cpu", conf=middle, color="rgb")
    for found in (predictor(image, color="rgb", conf=middle, max_det=300), other(image)):
        assert rows(found) == [above]
    assert rows(load(tmp_path / "a.pt", device="cpu", color="rgb")(image)) == [above]  # the checkpoint's threshold
    assert len(predictor(image, color="rgb")[0]) == 5  # the calls have not changed the predictor
    assert rows(other(image, imgsz=96)) != rows(other(image))


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
    assert sum("NaN" in message for message in caplog.messages) == 1


def test_eight_threads_and_a_pickled_predictor_give_the_bits_of_one(predictor):
    images = [picture(*hw, seed=i) for i, hw in enumerate([(48, 64), (64, 48), (64, 64), (20, 90)] * 16)]
    expected = [rows(predictor(image, color="rgb")) for image in images]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda image: rows(predictor(image, color="rgb")), images)) == expected
    assert rows(pickle.loads(pickle.dumps(predictor))(images[0], color="rgb")) == expected[0]


def test_an_image_of_an_iterable_is_asked_for_after_the_result_of_the_one_before(predictor):
    """Which image is made may depend on that result."""
    asked = []

    def images():
        for number in range(3):
            asked.append(number)
            yield picture(seed=number)

    for number, _ in enumerate(predictor.stream(images(), color="rgb")):
        assert asked == list(range(number + 1))


@pytest.mark.parametrize("stored", [{"confidence": 0.5}, {}])
def test_another_size_than_that_of_the_threshold_is_warned_of_once(weights, tmp_path, caplog, stored):
    write_checkpoint(read_checkpoint(weights) | {"progress": stored}, tmp_path / "a.pt")
    model = load_from_hub(tmp_path / "a.pt", device="cpu")
    for size in (64, 96, 96):
        model(picture(), color="rgb", imgsz=size)
        model(picture(), color="rgb", imgsz=size, conf=0.3)
    assert len(caplog.messages) == len(stored)
    assert all("64" in message and "96" in message for message in caplog.messages)


@pytest.mark.parametrize(
    "source",
    [
        np.zeros((4, 4, 3), np.uint8),  # of unknown color
        np.zeros((4, 4)),
        torch.full((3, 4, 4), 255.0),
        "nowhere.jpg",
        "clip.mp4",
        7,
        [np.zeros((4, 4), np.uint8), None],
    ],
)
def test_unusable_images_are_refused(predictor, source):
    with pytest.raises(UserError, match=r"^[^\n]+$"):
        predictor(source)


def test_mistakes_in_a_stream_are_raised_at_the_call(predictor, tmp_path):
    for source in ("no.mp4", tmp_path, 7, picture(), None):
        with pytest.raises(UserError):
            predictor.stream(source)
    with pytest.raises(UserError, match=r"^vid_stride"):
        predictor.stream([], vid_stride=2)  # for videos only


@pytest.mark.parametrize(
    ("name", "value"), [("cnof", 0), ("imgsz", 70), ("conf", 25), ("classes", [2]), ("device", 7), ("color", "BGR")]
)
def test_unfit_settings_are_refused(predictor, name, value):
    with pytest.raises(UserError, match=rf"^(--)?{name}"):
        predictor(picture(), **{"color": "rgb", name: value})
