"""The lines of detect.py about frames."""

from __future__ import annotations

import numpy as np
import pytest

from engine.commands.detect_log import FRAME_LINE_EVERY_S, LOGGED_FRAMES, FrameLog
from engine.inference.detection_stream import FrameDetections
from engine.inference.sources.frames import Frame
from utils.config.settings import DetectConfig
from utils.detections import DetectionTable


@pytest.mark.parametrize("quiet", [False, True])
def test_a_line_says_that_later_frames_get_fewer_lines(caplog, quiet: bool):
    caplog.set_level("INFO", logger="lockstep")
    table = DetectionTable.concatenate([])
    frames = FrameLog(("a",), DetectConfig(weights="best.pt", source="in", quiet=quiet))
    for number in range(LOGGED_FRAMES + 5):
        frames.add(FrameDetections(Frame(f"{number}.jpg", np.zeros((1, 1, 3), np.uint8)), table, speed={}), table)
    if quiet:
        assert caplog.messages == []
    else:
        assert len(caplog.messages) == LOGGED_FRAMES + 1
        assert caplog.messages[-1] == f"from here on, a line at most every {FRAME_LINE_EVERY_S:g} s"
