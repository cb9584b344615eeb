"""Names of written files are unique and safe; videos of any frame rate and size can be written."""

import cv2
import numpy as np
import pytest

from engine.inference.detect_files import ResultFiles, UniqueStems, written_suffix
from engine.inference.results import Boxes, Results
from engine.inference.sources import Frame
from tests.scripts.detect.detection import frames_of
from utils.config.settings import DetectConfig


def test_stems_are_unique_and_safe():
    stem = UniqueStems()
    sources = ["x/a.jpg", "y/a.png", "z/A.mp4", "x/a.jpg", "0", "http://h/p/a%20b.jpg?v=1", "http://h/", "a/...jpg"]
    stems = [stem(source) for source in sources]
    assert stems[:7] == ["a", "a-2", "A-3", "a", "webcam0", "a b", "h_"]
    assert stem("rtsp://me@cam:8554/live?x=1", is_video=True) == "me_cam_8554_live_x=1"
    for is_video in (True, False):  # file systems take 255 bytes
        address = f"https://host/{'0' * 500}.mp4?signature={'0' * 500}{is_video}"
        assert len(stem(address, is_video=is_video)) == 100
    assert all(s and not set(s) & set("/\\:*?") for s in stems)


def write_video(folder, fps, *sides):
    """Writes a frame of each side; returns the path."""
    config = DetectConfig(weights="best.pt", source="0", project=str(folder))
    files = ResultFiles({0: "disc"}, config)
    files.open_folder()
    for index, side in enumerate(sides):
        image = np.zeros((side, side, 3), np.uint8)
        frame = Frame("clip.mp4", image, index, fps, is_video=True, total=len(sides))
        result = Results(image, frame.path, {0: "disc"}, Boxes(np.zeros((0, 6)), (side, side)), {})
        files.add(frame, result, image, b"")
    files.close()
    return files.folder / "clip.mp4"


@pytest.mark.parametrize("fps", [1000 / 3, 237.457, 119.743, 30000 / 1001, 14.985, 0.0125, 1e-6])
def test_any_frame_rate_can_be_written(tmp_path, fps):
    path = write_video(tmp_path, fps, 32, 32, 32)
    assert len(frames_of(path)) == 3
    if fps > 0.1:
        assert cv2.VideoCapture(str(path)).get(cv2.CAP_PROP_FPS) == pytest.approx(fps, rel=1e-3)


def test_frames_may_change_size_and_unwritable_formats_become_jpg(tmp_path):
    assert len(frames_of(write_video(tmp_path, 5.0, 32, 48))) == 2
    assert [written_suffix(name) for name in ("p.mpo", "p.PNG", "a.b/p")] == [".jpg", ".PNG", ".jpg"]
