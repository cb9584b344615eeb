"""Names of written files are unique and safe; videos of any frame rate and size can be written."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from engine.inference.detect_files import ResultFiles, UniqueStems, written_suffix
from engine.inference.results import Boxes, Results
from engine.inference.sources import Frame
from tests.scripts.detect.detection import frames_of, names_in
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


FILES = ["x/a:b.jpg", "x/a_b.jpg", "x/c.jpg", "y/c.jpg", "x/c-2.jpg", "x/D.jpg", "x/d.png", "x/ .jpg", "x/_.jpg"]
FRAME = "x/clip_000001.jpg"


@pytest.mark.parametrize("order", [FILES, FILES[::-1], sorted(FILES)])
def test_only_a_file_of_that_name_has_it(order):
    """Results named like another image would be taken for its labels."""
    stem_of = UniqueStems([*FILES, FRAME])
    stems = {file: stem_of(file) for file in order}
    assert len({stem.casefold() for stem in stems.values()}) == len(FILES)
    own = {Path(file).stem for file in FILES}
    for file, stem in stems.items():
        assert stem == Path(file).stem or stem not in own, file
    assert stem_of.renamed == {file: stem for file, stem in stems.items() if stem != Path(file).stem}
    assert f"{stem_of('x/clip.mp4', is_video=True)}_000001" != stem_of(FRAME) == "clip_000001"


def test_boxes_without_pixels_make_no_crop(tmp_path):
    boxes = Boxes(np.array([[-20.0, 5, -10, 9, 0.5, 0], [1.2, 1.2, 3.5, 2.5, 0.5, 0]]), (20, 20))
    Results(np.zeros((20, 20, 3), np.uint8), "a.jpg", {0: "a"}, boxes, {}).save_crop(tmp_path / "crops", "a.jpg")
    assert names_in(tmp_path) == ["crops/a/a_1.jpg"]
    assert cv2.imread(str(tmp_path / "crops/a/a_1.jpg")).shape == (7, 8, 3)


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
