"""The programs in examples/ run."""

from __future__ import annotations

import re
import runpy
import sys

import cv2
import pytest

from engine.inference import predict
from engine.inference.model import open_model
from tests.engine.inference.known_detections import KnownDetections
from tests.helpers.documents import ROOT
from tests.helpers.moving_scene import NAMES, scene, write_video
from tests.helpers.tiny import write_weights


def test_tracking_with_opencv(tmp_path, monkeypatch, capsys):
    """A stand-in for a trained model finds the objects of the scene."""
    pytest.importorskip("trackers")
    frames = list(scene(90))
    weights = write_weights(tmp_path / "best.pt", NAMES)
    video = write_video(tmp_path / "clip.mp4", frames)
    monkeypatch.setattr(predict, "load", lambda path, **more: KnownDetections(open_model(path), frames, **more))
    output = tmp_path / "out.mp4"
    words = [str(weights), str(video), str(output), "--conf", "0.5"]
    monkeypatch.setattr(sys, "argv", ["track_with_opencv.py", *words])
    runpy.run_path(str(ROOT / "examples" / "track_with_opencv.py"), run_name="__main__")
    tracks, crossings = map(int, re.fullmatch(r"(\d+) tracks, (\d+) crossings\n", capsys.readouterr().out).groups())
    assert tracks >= 7
    assert crossings >= 2  # the balls cross the middle
    assert cv2.VideoCapture(str(output)).get(cv2.CAP_PROP_FRAME_COUNT) == len(frames)
