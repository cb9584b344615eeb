"""Streams of the Python interface: read one by one, detected in batches, and an error comes at its place."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from engine.inference.detection_stream import DetectionStream
from engine.inference.predictor import load
from engine.inference.read_ahead import ReadAheadLimit
from engine.inference.sources.frames import FileProblem, Frame
from tests.engine.inference.conftest import picture, rows
from tests.helpers.messages import refused
from utils.errors import UserError
from utils.logger import configure_logging


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
    """A damaged file has its place between the others. If a batch does not fit in memory, its images are processed one
    by one."""
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
    for actual, want in zip(results, expected):
        np.testing.assert_allclose(actual.boxes.data.numpy(), np.array(want), atol=1e-3)
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


def test_an_image_of_an_iterable_is_asked_for_after_the_result_of_the_one_before(predictor):
    """Which image is made may depend on that result."""
    asked = []

    def images():
        for number in range(3):
            asked.append(number)
            yield picture(seed=number)

    for number, _ in enumerate(predictor.stream(images(), color="rgb")):
        assert asked == list(range(number + 1))


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


def test_a_stream_takes_settings_and_iterables(predictor, tmp_path):
    images = [picture(seed=i) for i in range(3)]
    for number, image in enumerate(images):
        cv2.imwrite(str(tmp_path / f"{number}.png"), image[..., ::-1])
    expected = rows(predictor(images, color="rgb", max_det=2))
    for source in (tmp_path, iter(images), [tmp_path / "0.png", images[1], tmp_path / "2.png"]):
        assert rows(predictor.stream(source, color="rgb", max_det=2)) == expected
    assert list(predictor.stream([])) == []
