"""Streams of the Python interface: read one by one, detected in batches, and an error comes at its place."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import cv2
import numpy as np
import pytest

from engine.inference.detector import detect_frames
from engine.inference.predictor import load
from engine.inference.sources import FileProblem, Frame, ReadAhead
from tests.engine.inference.conftest import picture, rows
from utils.errors import UserError
from utils.logger import configure_logging


@pytest.mark.parametrize("size", [1, 4])
def test_streams_are_processed_in_batches(weights, tmp_path, monkeypatch, capsys, size):
    """A damaged file has its place between the others."""
    configure_logging(True)
    own = load(weights, device="cpu", conf=0.0, max_det=5)
    for i in range(9):
        hw = ((30, 64), (64, 30), (30, 64))[i % 3]
        cv2.imwrite(str(tmp_path / f"{i}.png"), picture(*hw, seed=i)[..., ::-1])
    (tmp_path / "5.png").write_bytes(b"no image")
    expected = [rows(own(path))[0] for path in sorted(tmp_path.iterdir()) if path.stem != "5"]
    seen = []
    own.image_detector.model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    monkeypatch.setattr(own.image_detector, "images_at_once", lambda batch_size=0: size)
    results = list(own.stream(tmp_path))
    assert [Path(result.path).stem for result in results] == list("01234678")
    for actual, want in zip(results, expected):
        np.testing.assert_allclose(actual.boxes.data.numpy(), np.array(want), atol=1e-3)
    assert max(seen) == min(size, 3)
    assert sum(seen) == 8
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"warning: {tmp_path / '5.png'}: ")


def test_an_image_of_an_iterable_is_asked_for_after_the_result_of_the_one_before(predictor):
    """Which image is made may depend on that result."""
    asked = []

    def images():
        for number in range(3):
            asked.append(number)
            yield picture(seed=number)

    for number, _ in enumerate(predictor.stream(images(), color="rgb")):
        assert asked == list(range(number + 1))


def test_a_stream_takes_settings_and_iterables(predictor, tmp_path):
    images = [picture(seed=i) for i in range(3)]
    for number, image in enumerate(images):
        cv2.imwrite(str(tmp_path / f"{number}.png"), image[..., ::-1])
    expected = rows(predictor(images, color="rgb", max_det=2))
    for source in (tmp_path, iter(images), [tmp_path / "0.png", images[1], tmp_path / "2.png"]):
        assert rows(predictor.stream(source, color="rgb", max_det=2)) == expected
    assert list(predictor.stream([])) == []


def test_what_goes_wrong_comes_at_its_place_among_the_frames(predictor):
    """The source is closed in any case."""
    closed = []

    def items():
        try:
            for number in range(6):
                if number == 3:
                    yield FileProblem("3.png", "3.png: is damaged", is_skipped=True)
                yield Frame(f"{number}.png", picture())
            raise UserError("unplugged")
        finally:
            closed.append(True)

    threads = set(threading.enumerate())
    settings = predictor.settings.resolve(predictor.model)
    stream = detect_frames(items(), predictor.image_detector, settings, ahead=ReadAhead(4))
    with contextlib.closing(stream):
        seen = [next(stream) for _ in range(7)]
        with pytest.raises(UserError, match="unplugged"):
            next(stream)
    paths = [item.path if isinstance(item, FileProblem) else item.frame.path for item in seen]
    assert paths == ["0.png", "1.png", "2.png", "3.png", "3.png", "4.png", "5.png"]
    assert isinstance(seen[3], FileProblem)
    assert closed == [True]
    assert set(threading.enumerate()) <= threads


def test_mistakes_are_raised_at_the_call(predictor, tmp_path):
    (tmp_path / "empty").mkdir()
    for source in ("no.mp4", tmp_path / "empty", 7, picture(), None, 3.5):
        with pytest.raises(UserError):
            predictor.stream(source)
    for stride in (0, "2", 2):  # the last one is for videos only
        with pytest.raises(UserError, match=r"^vid_stride"):
            predictor.stream([], vid_stride=stride)
