"""Names of written files are unique and safe; videos of any frame rate and size can be written."""

import cv2
import numpy as np
import pytest

from engine.inference.results.detection_writer import write_crops
from engine.inference.results.result_names import UniqueStems, written_suffix
from engine.inference.results.video_writer import VideoFiles
from tests.scripts.detect.detection import frames_of, names_in


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


@pytest.mark.parametrize("order", [("clip.mp4", "clip_000001.jpg"), ("clip_000001.jpg", "clip.mp4")])
def test_an_image_named_like_a_frame_of_a_video_keeps_its_own_files(order):
    stem_of = UniqueStems()
    stems = {name: stem_of(name, is_video=name.endswith("mp4")) for name in order}
    frames = {f"{stems['clip.mp4']}_{number:06d}" for number in range(4)}
    assert stems["clip_000001.jpg"] not in frames
    assert stem_of("other_000001.jpg") == "other_000001"


def test_boxes_without_pixels_make_no_crop(tmp_path):
    boxes = np.array([[-20.0, 5, -10, 9], [1.2, 1.2, 3.5, 2.5]])
    write_crops(tmp_path / "crops", "a", np.zeros((20, 20, 3), np.uint8), boxes, folders=["a", "a"])
    assert names_in(tmp_path) == ["crops/a/a_1.jpg"]
    assert cv2.imread(str(tmp_path / "crops/a/a_1.jpg")).shape == (7, 8, 3)


def written(folder, fps, *sides):
    """Returns the files, still open, and the path of a video of frames of these sides."""
    media = VideoFiles(folder)
    for side in sides:
        path = media.add("s", np.zeros((side, side, 3), np.uint8), fps)
    return media, path


@pytest.mark.parametrize("fps", [1000 / 3, 237.457, 119.743, 30000 / 1001, 14.985, 0.0125, 1e-6])
def test_any_frame_rate_can_be_written(tmp_path, fps):
    media, path = written(tmp_path, fps, 32, 32, 32)
    media.close()
    assert len(frames_of(path)) == 3
    if fps > 0.1:
        assert cv2.VideoCapture(str(path)).get(cv2.CAP_PROP_FPS) == pytest.approx(fps, rel=1e-3)


def test_frames_may_change_size_and_unwritable_formats_become_jpg(tmp_path):
    media, path = written(tmp_path, 5.0, 32, 48)
    media.add("t", np.zeros((16, 16, 3), np.uint8), 5.0)
    media.close()
    assert len(frames_of(path)) == 2
    assert [written_suffix(name) for name in ("p.mpo", "p.PNG", "a.b/p")] == [".jpg", ".PNG", ".jpg"]
