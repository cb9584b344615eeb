"""The frames of all kinds of sources, in order, and the problems of their files."""

import re
import threading
import time

import cv2
import numpy as np
import pytest

from data.images.decode import read_image
from engine.inference import sources
from engine.inference.sources import SourceOptions, open_source
from tests.helpers.http_server import serve_folder
from utils.errors import UserError
from utils.pixels import RGB8, PixelFormat


def save_image(path, value, size=(24, 32)):
    ok, data = cv2.imencode(path.suffix, np.full((*size, 3), value, np.uint8))
    assert ok
    path.write_bytes(data.tobytes())
    return path


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    """Ten frames whose brightness is 20 times their number, red slightly above blue."""
    path = tmp_path_factory.mktemp("video") / "clip ä.mp4"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), 10, (64, 48))
    if not writer.isOpened():
        pytest.skip("this OpenCV cannot write mp4v")
    for number in range(10):
        writer.write(np.full((48, 64, 3), (number * 20, number * 20, number * 20 + 30), np.uint8))
    writer.release()
    return path


def numbers(frames):
    return [round((float(f.image[..., 2].mean())) / 20) for f in frames]


def test_a_folder_of_images_and_videos_is_sorted(tmp_path, video):
    for name in ("b.png", "größe 猫.jpg", "sub.png"):
        save_image(tmp_path / name, (10, 20, 30))
    (tmp_path / "notes.md").write_text("x")
    (tmp_path / "._b.png").write_text("x")  # macOS's copy of attributes
    (tmp_path / "c.mp4").write_bytes(video.read_bytes())
    frames = list(open_source(str(tmp_path), SourceOptions(max_frames=2)))
    names = [("b.png", 0), ("c.mp4", 0), ("c.mp4", 1), ("größe 猫.jpg", 1), ("sub.png", 2)]
    assert [(f.path.split("/")[-1], f.index) for f in frames] == names
    assert frames[0].image[0, 0].tolist() == [30, 20, 10]  # RGB


def test_a_file_whose_name_looks_like_an_address_is_a_file(tmp_path, video):
    """SECURITY.md: FFmpeg would connect to the host, or listen (``tcp:...?listen=1``)."""
    (tmp_path / "tcp:127.0.0.1:1?x.mp4").write_bytes(video.read_bytes())
    for source in (".", "*"):
        frames = list(open_source(source))
        assert numbers(frames) == [*range(10)]
    assert (frames[0].fps, frames[0].duration_s, frames[0].is_video) == (10.0, 1.0, True)


def test_globs_and_lists_are_sources(tmp_path):
    """Brackets in the name of an existing folder are no pattern."""
    folder = tmp_path / "cam [1]"
    (folder / "er").mkdir(parents=True)
    one = save_image(folder / "a1.png", 1)
    two = save_image(folder / "er" / "2.png", 2)
    assert [f.path for f in open_source(f"{folder}/**/*.png")] == [str(one), str(two)]
    assert [f.path for f in open_source(f"{folder}/a[12].png")] == [str(one)]
    listing = folder / "list.txt"
    listing.write_text(f"\ufeff./er/2.png\n\n{one}\n{one}\n", encoding="utf-8")
    assert [int(f.image.mean()) for f in open_source(str(listing))] == [2, 1]


@pytest.mark.parametrize("source", ["", "nowhere.jpg", "outer", "*.png", "empty.txt", "list.txt", "cams.txt", "97"])
def test_mistakes_are_reported_before_anything_is_read(tmp_path, source, monkeypatch):
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    save_image(tmp_path / "here.jpg", 3)
    texts = {"empty.txt": "\n", "list.txt": "here.jpg\nno.png", "cams.txt": "rtsp://me:secret@camera"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^(--source |webcam )?" + re.escape(source)) as error:
        open_source(source)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(("name", "asked"), [("a b.jpg", "a%20b.jpg?size=large#top"), ("deep.npy", "deep.npy")])
def test_an_image_can_be_read_from_a_url(tmp_path, monkeypatch, name, asked):
    """It is decoded as a file is, with all bits, not as a video of one frame."""
    values = np.random.default_rng(0).integers(0, 60_000, (48, 64, 3), dtype=np.uint16)
    if name.endswith("npy"):
        np.save(tmp_path / name, values)
    else:
        cv2.imwrite(str(tmp_path / name), (values >> 8).astype(np.uint8))
    pixels = PixelFormat(bits=16) if name.endswith("npy") else RGB8
    with serve_folder(tmp_path, monkeypatch) as address:
        (frame,) = open_source(f"{address}/{asked}", SourceOptions(pixels=pixels))
    assert (frame.is_video, frame.is_live) == (False, False)
    assert frame.path == f"{address.replace('me:s%20cret@', '')}/{asked.partition('?')[0]}"
    np.testing.assert_array_equal(frame.image, read_image(tmp_path / name, pixels=pixels))


def test_a_video_can_be_read_from_a_url(video, monkeypatch):
    with serve_folder(video.parent, monkeypatch) as address:
        try:
            frames = list(open_source(f"{address}/clip%20%C3%A4.mp4"))
        except UserError:
            pytest.skip("this OpenCV has no network back end")
    assert numbers(frames) == list(range(10))
    assert not [frame.path for frame in frames if "secret" in frame.path]


def test_a_damaged_file_raises_alone_and_is_skipped_among_others(tmp_path):
    for name in ("broken.jpg", "broken.mp4"):
        (tmp_path / name).write_bytes(b"not what the suffix says")
        with pytest.raises(UserError, match=name):
            list(open_source(str(tmp_path / name)))
    save_image(tmp_path / "good.png", 5)
    skipped = []
    (frame,) = open_source(str(tmp_path), SourceOptions(skip=lambda *problem: skipped.append(problem)))
    assert frame.path == str(tmp_path / "good.png")
    assert [number for _, number in skipped] == [1, 1]


class Camera:
    """A capture that delivers ``count`` frames, each on request; the pixels contain its number."""

    def __init__(self, count):
        self.count = count
        self.asked = 0  # calls of `read`
        self.number = 0  # delivered frames
        self.released = False
        self.gate = threading.Semaphore(0)

    def read(self):
        self.asked += 1
        self.gate.acquire()
        if self.number == self.count:
            return False, None
        self.number += 1
        return True, np.full((4, 4, 3), self.number - 1, np.uint8)

    def get(self, what):
        return -1.0 if what == cv2.CAP_PROP_FRAME_COUNT else 0.0

    def isOpened(self):
        return True

    def release(self):
        self.released = True


def test_a_live_stream_returns_the_newest_frame(monkeypatch):
    camera = Camera(6)
    monkeypatch.setattr(sources.cv2, "VideoCapture", lambda source: camera)
    monkeypatch.setattr(sources, "RETRY_PAUSES_S", ())
    frames = open_source("0")
    camera.gate.release()
    assert next(frames).index == 0
    for _ in range(5):
        camera.gate.release()
    while camera.asked < 7:  # after that the sixth frame waits for the reader
        time.sleep(0.001)
    newest = next(frames)  # 1 to 4 were missed
    assert newest.index == 5
    assert (newest.image == 5).all()
    camera.gate.release()
    with pytest.raises(UserError, match=r"^0: was lost"):
        next(frames)
    assert camera.released
