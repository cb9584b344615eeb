"""The files of detect.py, and their names: labels, tracks, predictions.json, crops, images, videos."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import cv2
import numpy as np

from engine.evaluation.coco_classes import coco_category_ids
from engine.inference.results import Results, safe_name, written_suffix
from engine.inference.sources import Frame, is_video, quiet_codecs, sequence_of, source_files
from utils.boxes import xyxy_to_xywh
from utils.config.settings import DetectConfig
from utils.errors import UserError
from utils.files.new_folder import increment_path
from utils.files.safe_io import folder_below, open_direct, open_new, write_whole
from utils.files.url import url_path
from utils.labels import image_ids_of

SPARE_BYTES = 1 << 20


class Drawn(NamedTuple):
    """What was found in a frame, and a picture of it."""

    result: Results
    drawing: np.ndarray | None  # uint8 (H, W, 3) RGB, if it is shown or saved
    encoded: bytes  # the drawing as an image file, if it is saved as one


class ResultFiles:
    """Writes the files of a run of detect.py into its folder, which is created with the first one.

    NAME is that of `result_names`, and NAME_FRAME for the frames of videos:

    - labels/NAME.txt, empty without detections; ``save_conf`` adds the confidence as a sixth number
    - tracks/NAME.txt, instead of labels, where NAME is a video's or a folder's
    - predictions.json
    - crops/CLASS/NAME_NUMBER.jpg; a folder in NAME is above CLASS
    - images with their boxes, NAME.jpg or with another suffix of images, and videos, NAME.mp4
    """

    def __init__(self, config: DetectConfig) -> None:
        """Raises UserError for a source in the folder of the results."""
        self.path: Path | None = None
        self.note = ""  # about the format of videos
        self._config = config
        self._begun: set[Path] = set()  # files of tracks
        self._json: BinaryIO | None = None
        self._video: VideoFile | None = None  # the newest one
        files = source_files(config.source)
        target = Path(config.project, config.name).resolve()
        for path in files if config.exist_ok else ():
            # A link may be in the folder, or lead to it.
            if any(place.resolve().is_relative_to(target) for place in (path.parent, path)):
                reason = "is in the folder of the results and could be overwritten"
                raise UserError(f"{path}: {reason}; choose another --project or --name")
        self._names = result_names(files)
        self._track_names = result_names(_track_path(sequence_of(path)) for path in files)
        names = tuple(self._names.values())
        # By name; names of videos get the numbers of frames.
        self._image_ids = {} if any(map(is_video, files)) else dict(zip(names, image_ids_of(names)))

    def write(self, drawn: Drawn) -> None:
        """Writes what the flags request of a frame."""
        config = self._config
        result = drawn.result
        frame = result.frame
        stem = self._name_of(frame.path)
        name = f"{stem}_{frame.index:06d}" if frame.is_video else stem
        if config.save_txt and config.track:
            self._write_tracks(result)
        elif config.save_txt:
            result.save_txt(self._file(f"labels/{name}.txt"), save_conf=config.save_conf)
        if config.save_json:
            self._write_json(result, name)
        if config.save_crop:
            result.save_crop(self._file(f"crops/{name}").parent, f"{name}.jpg")
        if drawn.encoded:
            write_whole(self._file(stem + written_suffix(frame.path)), drawn.encoded)
        elif drawn.drawing is not None and not config.nosave:
            self._write_video(self._file(f"{stem}.mp4"), frame, drawn.drawing)

    def close(self) -> None:
        """Completes predictions.json and the newest video, which cannot be played before that."""
        with contextlib.ExitStack() as stack:
            if self._json is not None:
                file = stack.enter_context(self._json)
                stack.callback(file.write, b"]" if file.tell() == 1 else b"\n]")
            if self._video is not None:
                self._video.close()

    def _file(self, name: str) -> Path:
        """Returns the path of the file ``name``, whose own folder exists then and is no link."""
        if self.path is None:
            self.path = increment_path(self._config.project, self._config.name, self._config.exist_ok)
        return folder_below(self.path, Path(name).parent) / Path(name).name

    def _name_of(self, path: str) -> str:
        """Names the file, webcam or URL of a frame (`Frame.path`)."""
        if path in self._names:
            return self._names[path]
        if path.isdigit():
            return f"webcam{path}"
        return safe_name(Path(url_path(path)).stem or path.partition("://")[2])[:100]

    def _write_tracks(self, result: Results) -> None:
        """Appends to the file of the frame's sequence, in MOT Challenge's format: lines of the frame's number from 1,
        id, left, top, width, height, score and three times -1."""
        frame = result.frame
        name = self._track_names.get(_track_path(frame.sequence)) or self._name_of(frame.path)
        path = self._file(f"tracks/{name}.txt")
        boxes = result.boxes.array.astype(np.float64)
        rows = np.concatenate([boxes[:, 4:5], xyxy_to_xywh(boxes[:, :4]), boxes[:, 5:6]], 1)
        template = f"{frame.index + 1},%d,%.3f,%.3f,%.3f,%.3f,%.6f,-1,-1,-1\n"
        with open(path, "ab", opener=open_direct) if path in self._begun else open_new(path) as file:
            file.write("".join(template % tuple(row) for row in rows.tolist()).encode())
        self._begun.add(path)

    def _write_json(self, result: Results, name: str) -> None:
        """Appends to predictions.json. Image ids are names, or numbers if all names of the source are numbers; category
        ids are COCO's for a model of its classes, else the numbers of the classes."""
        frame = result.frame
        if self._json is None:
            self._json = open_new(self._file("predictions.json"))
            self._json.write(b"[")
        category_ids = coco_category_ids(tuple(result.names.values())) or tuple(result.names)
        common: dict[str, Any] = {"image_id": self._image_ids.get(name, name), "file": frame.path}
        if frame.is_video:
            common |= {"frame": frame.index, "time": round(frame.time_s, 3)}
        boxes = result.boxes
        corners = np.round(xyxy_to_xywh(boxes.array[:, :4].astype(np.float64)), 3).tolist()
        scores = boxes.array[:, -2].astype(np.float64).tolist()
        for row, (c, box, score) in enumerate(zip(boxes.classes, corners, scores)):
            category = {"category_id": category_ids[c], "category": result.names[c]}
            entry = common | category | {"bbox": box, "score": round(score, 6)}
            if boxes.track_ids is not None:
                entry["track_id"] = boxes.track_ids[row]
            text = json.dumps([entry], ensure_ascii=False, indent=1).removeprefix("[").removesuffix("\n]")
            separator = "," if self._json.tell() > 1 else ""
            self._json.write(f"{separator}{text}".encode(errors="backslashreplace"))

    def _write_video(self, path: Path, frame: Frame, image: np.ndarray) -> None:
        """Raises OSError while the disk still has space for the index of the video: on a full disk, OpenCV would leave
        a file that cannot be played, without an error."""
        if shutil.disk_usage(path.parent).free < SPARE_BYTES + image.nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if self._video is not None and path != self._video.path:
            video, self._video = self._video, None
            video.close()
        if self._video is None:
            self._video = VideoFile(path, frame.fps, image.shape[1::-1])
            if self._video.codec == "mp4v":
                self.note = " (videos in MPEG-4 Part 2, which browsers do not play; with ffmpeg installed, in H.264)"
        self._video.add(frame, image)


class VideoFile:
    """A video with a constant frame rate: a frame is repeated until the next one is due, so that the video has the
    speed of its source. Frames are resized to the first frame's size."""

    def __init__(self, path: Path, fps: float, size_wh: tuple[int, int]) -> None:
        self.path = path
        self._size_wh = size_wh
        # OpenCV writes a frame rate as a fraction with powers of ten, whose numerator MPEG-4 limits to 65,535.
        self._fps = max(round(fps, 1 if fps > 65 else 3), 0.002)
        path.unlink(missing_ok=True)  # OpenCV would write to where it links
        self._video, self.codec = open_video(path, self._fps, size_wh)
        self._count = 0  # frames written
        self._newest_bgr: np.ndarray | None = None
        self._newest_end_s = 0.0

    def add(self, frame: Frame, image: np.ndarray) -> None:
        self._show_until(frame.time_s)
        if image.shape[1::-1] != self._size_wh:
            image = cv2.resize(image, self._size_wh, interpolation=cv2.INTER_AREA)
        self._newest_bgr = cv2.cvtColor(image, cv2.COLOR_RGB2BGR)
        self._newest_end_s = frame.end_s

    def _show_until(self, time_s: float) -> None:
        """Writes the newest frame until the video lasts ``time_s``. It is written once if the video is thereby ahead by
        less than 1.5 frames, and otherwise, where frames follow each other faster than the frame rate, left out."""
        if self._newest_bgr is None:
            return
        due = time_s * self._fps
        repeats = max(round(due) - self._count, int(self._count - due < 0.5))
        for _ in range(repeats):
            self._video.write(self._newest_bgr)
        self._count += repeats

    def close(self) -> None:
        self._show_until(self._newest_end_s)
        self._video.release()


class H264Writer:
    """Writes a video with an installed ffmpeg, with the methods of `cv2.VideoWriter`."""

    def __init__(self, path: Path, fps: float, size_wh: tuple[int, int]) -> None:
        source = ["-f", "rawvideo", "-pix_fmt", "bgr24", "-s", f"{size_wh[0]}x{size_wh[1]}", "-framerate", str(fps)]
        even = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-pix_fmt", "yuv420p"]  # as all players need
        self._path = path
        self._process = subprocess.Popen(
            ["ffmpeg", "-y", *source, "-i", "-", "-c:v", "libx264", *even, "-movflags", "+faststart", f"file:{path}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal to this program leaves it to complete the file
        )

    def write(self, image: np.ndarray) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(image.tobytes())

    def release(self) -> None:
        """Completes the file. Raises UserError if ffmpeg could not write it."""
        self._process.communicate()
        if self._process.returncode:
            raise UserError(f"{self._path}: ffmpeg could not write it (status {self._process.returncode})")


def open_video(path: Path, fps: float, size_wh: tuple[int, int]) -> tuple[cv2.VideoWriter | H264Writer, str]:
    """Opens a video for writing, in H.264 if ffmpeg or OpenCV can. Returns the writer and its codec. Raises UserError
    if OpenCV cannot write the video at all."""
    if shutil.which("ffmpeg"):
        encoders = subprocess.run(["ffmpeg", "-encoders"], capture_output=True, text=True, check=False).stdout
        if " libx264 " in encoders:
            return H264Writer(path, fps, size_wh), "avc1"
    for codec in ("avc1", "mp4v"):
        with quiet_codecs():
            video = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*codec), fps, size_wh)
        if video.isOpened():
            return video, codec
    raise UserError(
        f"{path}: this OpenCV cannot write mp4 videos of {size_wh[0]}x{size_wh[1]} pixels; use --nosave with "
        "--save-txt or --save-json"
    )


def result_names(files: Iterable[str | Path]) -> dict[str, str]:
    """Names each file for its results, by path, so that no file's results replace another's.

    The names are the files' stems; if those of two images or two videos are equal, the paths without suffix below the
    folder that holds all files, so that labels/NAME.txt is where a data set has the label of the image. A file whose
    name another one still has keeps its suffix, as does a video with frames among the files, which ffmpeg calls
    clip_000001.jpg, too.
    """
    paths = {str(file): Path(os.path.abspath(file)) for file in files}
    names = {file: path.stem for file, path in paths.items()}

    def key(file: str) -> tuple[str, bool]:
        """Returns what is equal for files with the same results: those of a video have numbers of frames."""
        return names[file].casefold(), is_video(paths[file])

    if len(set(map(key, paths))) < len(paths):
        root = os.path.commonpath([path.parent for path in paths.values()])
        names = {file: path.relative_to(root).with_suffix("").as_posix() for file, path in paths.items()}
    counts = Counter(map(key, paths))
    frames = [re.fullmatch(r"(.*)_[0-9]{6,}", name) for name, _ in counts]
    taken = {(frame[1], True) for frame in frames if frame} | {name for name, count in counts.items() if count > 1}
    for _ in range(2):  # again for x.jpg, x.png and x.jpg.png
        names |= {file: name + paths[file].suffix for file, name in names.items() if key(file) in taken}
        taken = {name for name, count in Counter(map(key, paths)).items() if count > 1}
    return names


def _track_path(sequence: str) -> str:
    """Returns the file that stands for a sequence in `result_names`. The images of MOT Challenge's sequences are in
    SEQUENCE/img1."""
    return sequence if is_video(Path(sequence)) else sequence.removesuffix("/img1") + ".txt"
