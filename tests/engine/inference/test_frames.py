import contextlib
import itertools
import logging
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest

from data.images.decode import read_image
from engine.inference.sources import open_source as source_module
from engine.inference.sources import video as video_module
from engine.inference.sources.frames import FileProblem, Frame, SourceOptions
from engine.inference.sources.open_source import open_source
from engine.inference.sources.video import NewestFrames
from tests.helpers.http_server import serve_folder
from tests.helpers.messages import refused
from utils.errors import UserError
from utils.pixels import RGB8, PixelFormat

LONG_NAME = f"{'a' * 300}.png"  # file systems allow 255 bytes


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


def test_a_single_image_is_a_source(tmp_path):
    (frame,) = open_source(str(save_image(tmp_path / "größe 猫.png", (10, 20, 30))))
    assert frame.image.shape == (24, 32, 3)
    assert frame.image[0, 0].tolist() == [30, 20, 10]  # RGB
    assert (frame.index, frame.fps, frame.is_video, frame.total) == (0, 0.0, False, 1)


def test_a_folder_of_images_and_videos_is_sorted(tmp_path, video):
    for name in ("b.png", "a.jpg", "sub.png"):
        save_image(tmp_path / name, 50)
    (tmp_path / "notes.md").write_text("x")
    (tmp_path / "c.mp4").write_bytes(video.read_bytes())
    frames = list(open_source(str(tmp_path), SourceOptions(max_frames=2)))
    assert [(f.path.split("/")[-1], f.index) for f in frames] == [
        ("a.jpg", 0),
        ("b.png", 1),
        ("c.mp4", 0),
        ("c.mp4", 1),
        ("sub.png", 2),
    ]


def test_broken_links_and_pipes_are_reported(tmp_path):
    """OpenCV would wait for a pipe named like a video."""
    save_image(tmp_path / "a.jpg", 50)
    (tmp_path / "gone.png").symlink_to(tmp_path / "elsewhere" / "gone.png")
    (tmp_path / "gone.mp4").symlink_to("gone.mp4")
    os.mkfifo(tmp_path / "pipe.mp4")
    (tmp_path / "folder.jpg").mkdir()
    for source in (tmp_path, tmp_path / "*"):
        frame, *problems = open_source(str(source))
        assert frame.path == str(tmp_path / "a.jpg")
        reasons = {Path(problem.path).name: problem.reason for problem in problems if problem.is_skipped}
        assert reasons.keys() == {"gone.png", "gone.mp4", "pipe.mp4"}
        assert "is a pipe or device" in reasons["pipe.mp4"]


def test_images_that_are_not_read_are_named_in_one_line(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lockstep"), "propagate", True)
    save_image(tmp_path / "a.jpg", 50).rename(tmp_path / "a.JFIF")
    (tmp_path / "scan.heic").write_bytes(bytes(20))
    (tmp_path / "notes").write_text("x")
    (tmp_path / "folder.heic").mkdir()
    why = f"{tmp_path}/scan.heic: .heic files are not supported; convert them to JPEG or PNG"
    for source in (tmp_path, tmp_path / "*"):
        assert [frame.path for frame in open_source(str(source))] == [str(tmp_path / "a.JFIF")]
        assert caplog.messages == [f"{source}: 1 file left out, first {why}"]
        caplog.clear()
    (tmp_path / "list.txt").write_text("scan.heic\n")
    with refused("list.txt:1: scan.heic: .heic files are not supported; convert them to JPEG or PNG"):
        open_source(str(tmp_path / "list.txt"))
    (tmp_path / "a.JFIF").unlink()
    with refused(
        "...: no image or video in this folder (use a glob for its subfolders: .../**/*); 1 file left "
        "out, first .../scan.heic: ..."
    ):
        open_source(str(tmp_path))


def test_globs_and_lists_are_sources(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    one = save_image(tmp_path / "deep" / "1.png", 1)
    two = save_image(tmp_path / "deep" / "er" / "2.png", 2)
    assert [f.path for f in open_source(f"{tmp_path}/**/*.png")] == [str(one), str(two)]
    listing = tmp_path / "deep" / "list.txt"
    listing.write_text(f"\ufeff./er/2.png\n\n{one}\n{one}\n", encoding="utf-8")
    assert [int(f.image.mean()) for f in open_source(str(listing))] == [2, 1]


def test_brackets_in_globs_may_be_those_of_names(tmp_path):
    folder = tmp_path / "shots [2024]" / "a[1]"
    folder.mkdir(parents=True)
    files = [save_image(folder / f"{name}.png", i) for i, name in enumerate(("x[b]", "y[b]", "z1"))]
    for pattern, found in (
        (f"{folder}/*.png", files),
        (f"{tmp_path}/shots [2024]/**/*.png", files),
        (f"{folder}/?[[]b].png", files[:2]),
        (f"{folder}/*[b].png", files[:2]),  # which no name matches as a pattern
        (f"{folder}/[xyz]1.png", files[2:]),
        (f"{tmp_path}/shots [[]202[0-9]]/a[[]1]/z[0-9].png", files[2:]),
        (f"{folder}/x[b].png", files[:1]),
    ):
        assert [frame.path for frame in open_source(pattern)] == list(map(str, found)), pattern


def test_globs_relative_to_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "in [1]").mkdir()
    save_image(tmp_path / "in [1]" / "x.png", 1)
    monkeypatch.chdir(tmp_path)
    for pattern in ("in [1]/*.png", "*/x.png", "./in [1]/?.png", "in*/*"):
        assert [frame.path for frame in open_source(pattern)] == ["in [1]/x.png"]


def test_video_frames_follow_stride_and_limit(video):
    frames = list(open_source(str(video)))
    assert numbers(frames) == list(range(10))
    assert [f.index for f in frames] == list(range(10))
    assert frames[0].image[..., 0].mean() > frames[0].image[..., 2].mean()  # RGB
    assert (frames[0].fps, frames[0].total, frames[0].is_video) == (10.0, 10, True)
    assert numbers(open_source(str(video), SourceOptions(vid_stride=3))) == [0, 3, 6, 9]
    assert numbers(open_source(str(video), SourceOptions(vid_stride=4, max_frames=2))) == [0, 4]


def test_a_video_can_be_read_from_a_url(video, monkeypatch):
    with serve_folder(video.parent, monkeypatch) as address:
        try:
            frames = list(open_source(f"{address}/clip%20%C3%A4.mp4"))
        except UserError:
            pytest.skip("this OpenCV has no network back end")
    assert numbers(frames) == list(range(10))
    assert not [frame.path for frame in frames if "secret" in frame.path]


@pytest.mark.parametrize(
    ("name", "asked"),
    [("a b.jpg", "a%20b.jpg?size=large#top"), ("ä.PNG", "ä.PNG"), ("photo", "photo"), ("deep.npy", "deep.npy")],
)
def test_an_image_can_be_read_from_a_url(tmp_path, monkeypatch, name, asked):
    """It is decoded as a file is, with all bits, not as a video of one frame."""
    values = np.random.default_rng(0).integers(0, 60_000, (48, 64, 3), dtype=np.uint16)
    if name.endswith("npy"):
        np.save(tmp_path / name, values)
    else:
        path = tmp_path / ("x.jpg" if name == "photo" else name)
        cv2.imwrite(str(path), (values >> 8).astype(np.uint8) if path.suffix == ".jpg" else values)
        path.rename(tmp_path / name)
    pixels = RGB8 if name in ("a b.jpg", "photo") else PixelFormat(bits=16)
    with serve_folder(tmp_path, monkeypatch) as address:
        (frame,) = open_source(f"{address}/{asked}", SourceOptions(pixels=pixels))
    assert (frame.is_video, frame.is_live, frame.total) == (False, False, 1)
    assert frame.path == f"{address.replace('me:s%20cret@', '')}/{asked}"
    expected = np.array(read_image(tmp_path / name, pixels=pixels))
    np.testing.assert_array_equal(frame.image, expected)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("gone.jpg", r"http://127.0.0.1:\d+/gone.jpg: cannot be downloaded \(HTTP Error 404: File not found\)"),
        ("page.jpg", r"http://127.0.0.1:\d+/page.jpg: cannot be decoded"),
        ("page", r"http://127.0.0.1:\d+/page: cannot be opened"),
    ],
)
def test_urls_without_an_image_are_one_line(tmp_path, monkeypatch, asked, message):
    for name in ("page.jpg", "page"):
        (tmp_path / name).write_text("<html>")
    with serve_folder(tmp_path, monkeypatch) as address, pytest.raises(UserError, match=f"^{message}"):
        list(open_source(f"{address}/{asked}"))


def test_an_address_without_a_server_is_one_line():
    with pytest.raises(UserError, match=r"^http://127.0.0.1:9/a.jpg: cannot be downloaded \(.*refused"):
        open_source("http://me@127.0.0.1:9/a.jpg")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "nowhere.jpg",
            "nowhere.jpg: no such file or folder; a source is an image, folder, glob, video, list, webcam or URL",
        ),
        ("empty", "empty: no image or video in this folder"),
        ("outer", "outer: no image or video in this folder (use a glob for its subfolders: .../outer/**/*)"),
        ("notes.md", "notes.md: '.md' is not the suffix of an image or a video"),
        ("*.png", "*.png: the pattern matches no image or video"),
        ("empty.txt", "empty.txt: the list names no file"),
        ("list.txt", "list.txt:2: gone.png: no such file"),
        ("long.txt", f"long.txt:1: {LONG_NAME}: no such file"),
        ("bad.txt", "bad.txt:1: notes.md: '.md' is not the suffix of an image or a video"),
        (
            "/~nobody-here/a.jpg",
            "~nobody-here/a.jpg: no such file or folder; a source is an image, folder, glob, video, list, "
            "webcam or URL",
        ),
        ("/²", "²: no such file or folder; a source is an image, folder, glob, video, list, webcam or URL"),
        (
            "/12345678901234567890",
            "12345678901234567890: no such file or folder; a source is an image, folder, glob, video, list, "
            "webcam or URL",
        ),
        ("//dev/null", "/dev/null: is a pipe or device, not a file; cameras are named by their numbers: 0, 1, ..."),
        ("///[a", "//[a: the pattern matches no image or video"),
        ("/http://[a", "http://[a: cannot be opened"),
        ("/rtsp://me:secret@[a", "rtsp://[a: cannot be opened"),
    ],
)
def test_mistakes_are_reported_before_anything_is_read(tmp_path, source, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    save_image(tmp_path / "here.jpg", 3)
    texts = {"notes.md": "x", "empty.txt": "\n", "list.txt": "here.jpg\ngone.png\n", "bad.txt": "notes.md\n"}
    texts["long.txt"] = f"{LONG_NAME}\n"
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    with refused(message):
        open_source(source[1:] if source.startswith("/") else str(tmp_path / source))


def test_a_missing_webcam_and_a_url_without_frames_are_one_line(capfd, monkeypatch):
    with refused("webcam 97: not found, or in use"):
        open_source("97")
    assert capfd.readouterr().err == ""  # the script prints one line; OpenCV prints none
    unreadable = SimpleNamespace(get=lambda _: 48.0, grab=lambda: False, release=lambda: None)
    monkeypatch.setattr(source_module, "open_stream", lambda _: unreadable)
    with refused("http://127.0.0.1/clip.mp4: no frame can be read; download the video and give its path"):
        list(open_source("http://127.0.0.1/clip.mp4"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken.jpg", "broken.jpg: cannot be decoded (damaged, or not an image)"),
        ("broken.mp4", "broken.mp4: cannot be opened as a video (damaged, or a codec that this OpenCV lacks)"),
    ],
)
def test_a_damaged_file_raises_alone_and_is_skipped_among_others(tmp_path, name, message):
    (tmp_path / name).write_bytes(b"not what the suffix says")
    with refused(message):
        list(open_source(str(tmp_path / name)))
    with refused(message):
        list(open_source(str(tmp_path)))
    save_image(tmp_path / "good.png", 5)
    problem, frame = open_source(str(tmp_path))
    assert (problem.path, problem.is_skipped, frame.path) == (str(tmp_path / name), True, str(tmp_path / "good.png"))
    assert name in problem.reason


def test_a_truncated_video_is_reported(video, monkeypatch):
    class Short:
        """A capture that claims twenty frames and delivers ten."""

        def __init__(self, path):
            self._inner = true_capture(path)

        def __getattr__(self, name):
            return getattr(self._inner, name)

        def get(self, what):
            return 20.0 if what == cv2.CAP_PROP_FRAME_COUNT else self._inner.get(what)

    true_capture = cv2.VideoCapture
    monkeypatch.setattr(video_module.cv2, "VideoCapture", Short)
    *frames, problem = open_source(str(video))
    assert len(frames) == 10
    reason = f"{video}: ends after 10 of 20 frames (damaged, or OpenCV cannot read the rest)"
    assert problem == FileProblem(str(video), reason, is_skipped=False)
    assert len(list(open_source(str(video), SourceOptions(max_frames=3)))) == 3


@pytest.mark.parametrize("length", [0.0, 50.0])  # some containers, such as MPEG-TS, state no length
def test_a_video_without_a_frame_is_reported(tmp_path, monkeypatch, length):
    empty = SimpleNamespace(isOpened=lambda: True, get=lambda _: length, grab=lambda: False, release=lambda: None)
    monkeypatch.setattr(video_module.cv2, "VideoCapture", lambda path: empty)
    image = save_image(tmp_path / "a.jpg", 5)
    video = tmp_path / "b.ts"
    video.write_bytes(b"a header")
    reason = f"{video}: no frame can be read (damaged, or a codec that this OpenCV lacks)"
    frame, problem = open_source(str(tmp_path))
    assert frame.path == str(image)
    assert problem == FileProblem(str(video), reason, is_skipped=True)
    with refused(reason):
        list(open_source(str(video)))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_reading_ahead_changes_neither_the_frames_nor_their_order(tmp_path, video, threads, ahead):
    for number in range(12):
        save_image(
            tmp_path / f"{number:02d}.jpg", 20 * number, size=(480 // (number + 1), 32)
        )  # the first ones take longest
    (tmp_path / "03.jpg").write_bytes(b"no image")
    (tmp_path / "05b.mp4").write_bytes(video.read_bytes())

    def content(**options):
        return [
            (item.path, item.index, item.image.tobytes()) if isinstance(item, Frame) else item
            for item in open_source(str(tmp_path), SourceOptions(**options))
        ]

    items = content()
    assert [item.path[-6:] for item in items if isinstance(item, FileProblem)] == ["03.jpg"]
    assert len(items) == 12 + 10
    assert content(threads=threads, ahead=lambda: ahead) == items


def test_no_more_is_read_ahead_than_asked_for(tmp_path, video, monkeypatch):
    for number in range(20):
        save_image(tmp_path / f"{number:02d}.jpg", number)
    read = []
    monkeypatch.setattr(
        source_module, "read_image", lambda path, *_: read.append(path) or np.zeros((4, 4, 3), np.uint8)
    )
    before = set(threading.enumerate())
    frames = open_source(str(tmp_path), SourceOptions(threads=2, ahead=lambda: 3))
    for taken in range(1, 6):
        next(frames)
        assert taken <= len(read) <= taken + 3
    frames.close()
    assert set(threading.enumerate()) <= before
    retrieved = []
    to_format = video_module.to_format
    monkeypatch.setattr(video_module, "to_format", lambda *args: retrieved.append(1) or to_format(*args))
    frames = open_source(str(video), SourceOptions(ahead=lambda: 3))
    next(frames)
    frames.close()
    assert len(retrieved) <= 4


class Camera:
    """A capture that delivers ``count`` frames, each on request; the pixels contain its number."""

    def __init__(self, count, length=-1.0):
        self.count = count
        self.length = length
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
        return self.length if what == cv2.CAP_PROP_FRAME_COUNT else 0.0

    def isOpened(self):
        return True

    def release(self):
        self.released = True


def test_a_live_stream_returns_the_newest_frame():
    camera = Camera(6)
    frames = NewestFrames(camera, "camera")
    camera.gate.release()
    assert next(frames)[0] == 0
    for _ in range(5):
        camera.gate.release()
    while camera.asked < 7:  # after that the sixth frame waits for the reader
        time.sleep(0.001)
    camera.gate.release()
    ((number, frame),) = frames  # 1 to 4 were missed
    assert number == 5
    assert (frame == 5).all()
    frames.close()
    assert camera.released


def test_a_live_source_skips_frames_by_the_stride_and_releases_its_capture(monkeypatch):
    camera = Camera(5)
    monkeypatch.setattr(video_module.cv2, "VideoCapture", lambda source: camera)
    monkeypatch.setattr(video_module, "LOST_SOURCE_S", 0)
    camera.gate.release()
    seen = []
    with refused("rtsp://camera/1: was lost, and is not back after 0 s"):
        for frame in open_source("rtsp://camera/1", SourceOptions(vid_stride=2)):
            seen.append(frame.index)
            assert frame.is_live
            camera.gate.release()
            camera.gate.release()
    assert seen[0] == 0
    assert all(b - a >= 2 for a, b in itertools.pairwise(seen))
    assert frame.fps == video_module.DEFAULT_FPS
    assert frame.total is None
    assert camera.released


def test_a_silent_stream_is_one_line_and_max_frames_limits_a_stream(monkeypatch):
    camera = Camera(5)
    monkeypatch.setattr(video_module.cv2, "VideoCapture", lambda source: camera)
    monkeypatch.setattr(video_module, "STREAM_TIMEOUT_S", 0.05)
    for _ in range(6):
        camera.gate.release()
    assert len(list(open_source("0", SourceOptions(max_frames=1)))) == 1
    camera = Camera(5)
    frames = open_source("rtsp://camera/1")
    threading.Timer(0.3, camera.gate.release).start()  # lets the thread end
    with refused("rtsp://camera/1: no frame for 0 s"):
        next(frames)


def test_a_stream_that_cannot_be_read_says_why():
    """An error in the thread that reads is raised at once, not after the time without a frame."""

    class Camera:
        def read(self):
            raise cv2.error("unplugged")

        def release(self):
            released.append(True)

    released = []
    is_error = pytest.raises(UserError, match=r"camera: its frames cannot be read \(unplugged\)")
    with is_error, contextlib.closing(NewestFrames(Camera(), "camera")) as frames:
        next(frames)
    assert released == [True]
