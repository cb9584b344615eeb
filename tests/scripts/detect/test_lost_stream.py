"""A live source that is lost in detect.py, against a camera on this machine (ultralytics#15057)."""

from __future__ import annotations

import pytest

import detect
from engine.inference import sources
from tests.helpers.mjpeg_server import serve_mjpeg
from tests.helpers.scripts import call
from tests.scripts.detect.detection import frames_of, run


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "RETRY_PAUSES_S", (0.1, 0.5, 0.5))


def test_detect_goes_on_when_a_lost_camera_is_back(weights, tmp_path, monkeypatch, capsys):
    with serve_mjpeg((5, 5, 10**6), monkeypatch) as url:
        folder = run(weights, url, tmp_path, "--max-frames", "11")  # the first two connections have at most ten
    lines = capsys.readouterr().out.splitlines()
    (video_file,) = folder.glob("*.mp4")
    assert len(frames_of(video_file)) >= 11  # missed frames are repeated, so that it plays in real time
    assert any(line.startswith("11 frames: ") for line in lines)
    assert sum(line.startswith("warning: http") for line in lines) == 2
    assert sum("is back" in line for line in lines) == 2
    assert not any("secret" in line for line in lines)


def test_detect_fails_when_a_lost_camera_does_not_come_back(weights, tmp_path, monkeypatch, capfd):
    with serve_mjpeg((5,), monkeypatch) as url, pytest.raises(SystemExit) as error:
        call(detect.main, "--weights", weights, "--source", url, "--device", "cpu", "--project", tmp_path)
    assert error.value.code not in (None, 0)
    (video_file,) = (tmp_path / "exp").glob("*.mp4")
    assert frames_of(video_file)  # what came before is complete
