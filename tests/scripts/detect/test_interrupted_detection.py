"""After Ctrl-C, a signal or a disk error, detect.py leaves complete files of all earlier detections."""

import signal

import cv2
import numpy as np
import pytest

from engine.inference import detect as detection
from tests.helpers.preloaded import python
from tests.helpers.processes import Processes
from tests.scripts.detect.detection import frames_of, read, read_txt, run


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
