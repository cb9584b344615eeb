"""After Ctrl-C, a signal or a disk error, detect.py leaves complete files of all earlier detections."""

import errno
import itertools
import pkgutil
import signal

import cv2
import numpy as np
import pytest

import detect
from engine.inference import detect as detection
from engine.inference.sources import ReadAhead
from tests.helpers.preloaded import python
from tests.helpers.processes import Processes
from tests.helpers.scripts import error_of
from tests.scripts.detect.detection import frames_of, names_in, read, read_txt, run


def test_an_interrupted_run_keeps_its_results(weights, clip, tmp_path, monkeypatch):
    calls = []
    true_add = detection.FrameLog.add

    def interrupt(self, *args):
        calls.append(1)
        if len(calls) == 3:  # no later frame is written
            raise KeyboardInterrupt
        true_add(self, *args)

    monkeypatch.setattr(detection.FrameLog, "add", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(weights, clip, tmp_path, "--save-json")
    folder = tmp_path / "runs" / "exp"
    assert {r["frame"] for r in read(folder)} == {0, 1}
    assert cv2.VideoCapture(str(folder / "clip.mp4")).read()[0]


def failing_once(function, error):
    """Returns ``function``, changed to raise ``error`` in its fourth call."""
    calls = itertools.count(1)

    def call(*given):
        if next(calls) == 4:
            raise error
        return function(*given)

    return call


FULL = OSError(errno.ENOSPC, "No space left on device", "runs/exp")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("engine.inference.detect_files.write_whole", FULL, "runs/exp: the disk is full; free some space or choose"),
        ("engine.inference.detect_files.shutil.disk_usage", FULL, "runs/exp: the disk is full; free some space or"),
        (
            "engine.inference.sources.read_image",
            OSError(errno.EIO, "Input/output error", "3.jpg"),
            "3.jpg: input/output error; the",
        ),
    ],
)
def test_an_error_of_a_disk_ends_detection_with_what_was_written_before(
    weights, clip, tmp_path, capsys, monkeypatch, name, error, message
):
    source = tmp_path / "in"
    source.mkdir()
    for number in range(9):
        cv2.imwrite(str(source / f"{number}.jpg"), np.full((64, 64, 3), 20 * number, np.uint8))
    source = clip if "disk_usage" in name else source
    module, _, function = name.rpartition(".")
    monkeypatch.setattr(name, failing_once(getattr(pkgutil.resolve_name(module), function), error))
    monkeypatch.setattr(detection, "ReadAhead", lambda _: ReadAhead(4))
    flags = ("--weights", weights, "--device", "cpu", "--project", tmp_path / "runs")
    assert error_of(capsys, detect.main, "--source", source, *flags).startswith(f"error: {message}")
    folder = tmp_path / "runs" / "exp"
    if source == clip:
        assert len(frames_of(folder / "clip.mp4")) >= 3
    else:
        assert names_in(folder)[:3] == ["0.jpg", "1.jpg", "2.jpg"]
        assert "3.jpg" not in names_in(folder)


@pytest.fixture(scope="module")
def much(tmp_path_factory):
    """Nine images, and a video that takes longer than any test."""
    folder = tmp_path_factory.mktemp("much")
    noise = cv2.resize(np.random.default_rng(0).integers(0, 255, (8, 8, 3)).astype(np.uint8), (160, 120))
    for number in range(9):
        cv2.imwrite(str(folder / f"{number}.jpg"), noise)
    writer = cv2.VideoWriter(str(folder / "clip.mp4"), cv2.VideoWriter_fourcc(*"mp4v"), 25, (160, 120))
    for _ in range(3000):
        writer.write(noise)
    writer.release()
    return folder


@pytest.mark.parametrize(
    ("stop", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow)],
)
def test_a_stopped_run_leaves_whole_files(weights, much, tmp_path, stop, code):
    run_dir = tmp_path / "runs" / "exp"
    flags = ["--source", much, "--project", tmp_path / "runs", "--device", "cpu", "--conf-thres", "0", "--max-det", "2"]
    command = [python(), "detect.py", "--weights", weights, *flags, "--save-txt", "--save-json"]
    with Processes(tmp_path / "log") as processes:
        process = processes.start([str(word) for word in command])
        processes.until(lambda: len(list(run_dir.glob("labels/*.txt"))) > 20)
        process.send_signal(stop)
        assert process.wait(60) == code, processes.output()
        assert "Traceback" not in processes.output()
    stems = {path.stem for path in run_dir.glob("labels/*.txt")}
    assert {record["image_id"] for record in read(run_dir)} == stems
    assert not list(run_dir.rglob("*.tmp"))
    assert all(len(read_txt(path)) == 2 for path in run_dir.glob("labels/*.txt"))
    assert all(cv2.imread(str(run_dir / f"{number}.jpg")).shape == (120, 160, 3) for number in range(9))
    assert len(frames_of(run_dir / "clip.mp4")) == len(stems) - 9
