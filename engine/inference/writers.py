"""The files of detect.py, and their names: a writer for each kind of file (labels, tracks, predictions.json, crops,
images, videos)."""

from __future__ import annotations

import errno
import functools
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


class OutputFolder:
    """The folder of a run of detect.py, created with its first file, and the names of frames in it."""

    def __init__(self, config: DetectConfig) -> None:
        """Raises UserError for a source in the folder of the results."""
        self.path: Path | None = None
        self.note = ""  # about the format of videos
        self.config = config
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
        self.image_ids = {} if any(map(is_video, files)) else dict(zip(names, image_ids_of(names)))

    def file(self, name: str) -> Path:
        """Returns the path of the file ``name``, whose own folder exists then and is no link."""
        if self.path is None:
            self.path = increment_path(self.config.project, self.config.name, self.config.exist_ok)
        return folder_below(self.path, Path(name).parent) / Path(name).name

    def name_of(self, path: str) -> str:
        """Names the file, webcam or URL of a frame (`Frame.path`)."""
        if path in self._names:
            return self._names[path]
        if path.isdigit():
            return f"webcam{path}"
        return safe_name(Path(url_path(path)).stem or path.partition("://")[2])[:100]

    def frame_name(self, frame: Frame) -> str:
        """Names an image, or a frame of a video with its number."""
        name = self.name_of(frame.path)
        return f"{name}_{frame.index:06d}" if frame.is_video else name

    def track_name(self, frame: Frame) -> str:
        """Names the sequence of a frame."""
        return self._track_names.get(_track_path(frame.sequence)) or self.name_of(frame.path)


class Writer:
    """Writes the files of one kind. NAME is that of `result_names`, and NAME_FRAME for the frames of videos."""

    def __init__(self, output: OutputFolder) -> None:
        self.output = output

    def write(self, drawn: Drawn) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Completes the files that hold several frames."""


class LabelWriter(Writer):
    """Writes labels/NAME.txt, empty without detections; ``save_conf`` adds the confidence as a sixth number."""

    def write(self, drawn: Drawn) -> None:
        path = self.output.file(f"labels/{self.output.frame_name(drawn.result.frame)}.txt")
        drawn.result.save_txt(path, save_conf=self.output.config.save_conf)


class TrackWriter(Writer):
    """Writes tracks/NAME.txt in MOT Challenge's format, where NAME is a video's or a folder's: lines of the frame's
    number from 1, id, left, top, width, height, score and three times -1."""

    _begun: frozenset[Path] = frozenset()

    def write(self, drawn: Drawn) -> None:
        path = self.output.file(f"tracks/{self.output.track_name(drawn.result.frame)}.txt")
        boxes = drawn.result.boxes.array.astype(np.float64)
        rows = np.concatenate([boxes[:, 4:5], xyxy_to_xywh(boxes[:, :4]), boxes[:, 5:6]], 1)
        template = f"{drawn.result.frame.index + 1},%d,%.3f,%.3f,%.3f,%.3f,%.6f,-1,-1,-1\n"
        with open(path, "ab", opener=open_direct) if path in self._begun else open_new(path) as file:
            file.write("".join(template % tuple(row) for row in rows.tolist()).encode())
        self._begun |= {path}


class JsonWriter(Writer):
    """Writes predictions.json. Image ids are names, or numbers if all names of the source are numbers; category ids
    are COCO's for a model of its classes, else the numbers of the classes."""

    _file: BinaryIO | None = None

    def write(self, drawn: Drawn) -> None:
        frame = drawn.result.frame
        if self._file is None:
            self._file = open_new(self.output.file("predictions.json"))
            self._file.write(b"[")
        class_names = drawn.result.names
        category_ids = coco_category_ids(tuple(class_names.values())) or tuple(class_names)
        name = self.output.frame_name(frame)
        common: dict[str, Any] = {"image_id": self.output.image_ids.get(name, name), "file": frame.path}
        if frame.is_video:
            common |= {"frame": frame.index, "time": round(frame.time_s, 3)}
        boxes = drawn.result.boxes
        corners = np.round(xyxy_to_xywh(boxes.array[:, :4].astype(np.float64)), 3).tolist()
        scores = boxes.array[:, -2].astype(np.float64).tolist()
        for row, (c, box, score) in enumerate(zip(boxes.classes, corners, scores)):
            category = {"category_id": category_ids[c], "category": class_names[c]}
            entry = common | category | {"bbox": box, "score": round(score, 6)}
            if boxes.track_ids is not None:
                entry["track_id"] = boxes.track_ids[row]
            text = json.dumps([entry], ensure_ascii=False, indent=1).removeprefix("[").removesuffix("\n]")
            separator = "," if self._file.tell() > 1 else ""
            self._file.write(f"{separator}{text}".encode(errors="backslashreplace"))

    def close(self) -> None:
        if self._file is not None:
            with self._file as file:
                file.write(b"]" if file.tell() == 1 else b"\n]")


class CropWriter(Writer):
    """Writes crops/CLASS/NAME_NUMBER.jpg; a folder in NAME is above CLASS."""

    def write(self, drawn: Drawn) -> None:
        name = self.output.frame_name(drawn.result.frame)
        drawn.result.save_crop(self.output.file(f"crops/{name}").parent, f"{name}.jpg")


class ImageWriter(Writer):
    """Writes images with their boxes, NAME.jpg or with another suffix of images."""

    def write(self, drawn: Drawn) -> None:
        path = drawn.result.frame.path
        if not drawn.result.frame.is_video:
            write_whole(self.output.file(self.output.name_of(path) + written_suffix(path)), drawn.encoded)


class VideoWriter(Writer):
    """Writes videos with boxes, NAME.mp4.

    A video has a constant frame rate: a frame is repeated until the next one is due, so that the video has the speed of
    its source. Frames are resized to the first frame's size.
    """

    _video: cv2.VideoWriter | H264Writer | None = None  # the newest one
    _path = Path()
    _size_wh = (0, 0)
    _fps = 0.0
    _count = 0  # frames written
    _newest_bgr: np.ndarray = np.zeros(0)
    _newest_end_s = 0.0

    def write(self, drawn: Drawn) -> None:
        """Raises OSError while the disk still has space for the index of the video: on a full disk, OpenCV would leave
        a file that cannot be played, without an error."""
        frame = drawn.result.frame
        image = drawn.drawing
        if not frame.is_video or image is None:
            return
        path = self.output.file(f"{self.output.name_of(frame.path)}.mp4")
        if shutil.disk_usage(path.parent).free < SPARE_BYTES + image.nbytes:
            self.close()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if self._video is None or path != self._path:
            self.close()
            height, width = image.shape[:2]
            self._size_wh = (width, height)
            # OpenCV writes a frame rate as a fraction with powers of ten, whose numerator MPEG-4 limits to 65,535.
            self._fps = max(round(frame.fps, 1 if frame.fps > 65 else 3), 0.002)
            path.unlink(missing_ok=True)  # OpenCV would write to where it links
            self._video, codec = open_video(path, self._fps, self._size_wh)
            if codec == "mp4v":
                self.output.note = (
                    " (videos in MPEG-4 Part 2, which browsers do not play; with ffmpeg installed, in H.264)"
                )
            self._path = path
            self._count = 0
        else:
            self._show_until(frame.time_s)
        if image.shape[1::-1] != self._size_wh:
            image = cv2.resize(image, self._size_wh, interpolation=cv2.INTER_AREA)
        self._newest_bgr = cv2.cvtColor(image, cv2.COLOR_RGB2BGR)
        self._newest_end_s = frame.end_s

    def _show_until(self, time_s: float) -> None:
        """Writes the newest frame until the video lasts ``time_s``. It is written once if the video is thereby ahead by
        less than 1.5 frames, and otherwise, where frames follow each other faster than the frame rate, left out."""
        assert self._video is not None
        due = time_s * self._fps
        repeats = max(round(due) - self._count, int(self._count - due < 0.5))
        for _ in range(repeats):
            self._video.write(self._newest_bgr)
        self._count += repeats

    def close(self) -> None:
        """Finishes the open video, which cannot be played before that."""
        if self._video is not None:
            self._show_until(self._newest_end_s)
            self._video.release()
            self._video = None


def open_writers(output: OutputFolder) -> list[Writer]:
    """Returns the writers of the files that the flags request."""
    config = output.config
    table: list[tuple[type[Writer], object]] = [
        (LabelWriter, config.save_txt and not config.track),
        (TrackWriter, config.save_txt and config.track),
        (JsonWriter, config.save_json),
        (CropWriter, config.save_crop),
        (ImageWriter, not config.nosave),
        (VideoWriter, not config.nosave),
    ]
    return [writer(output) for writer, is_requested in table if is_requested]


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


@functools.cache
def _ffmpeg_has_h264() -> bool:
    if shutil.which("ffmpeg") is None:
        return False
    encoders = subprocess.run(["ffmpeg", "-encoders"], capture_output=True, text=True, check=False).stdout
    return " libx264 " in encoders


def open_video(path: Path, fps: float, size_wh: tuple[int, int]) -> tuple[cv2.VideoWriter | H264Writer, str]:
    """Opens a video for writing, in H.264 if ffmpeg or OpenCV can. Returns the writer and its codec. Raises UserError
    if OpenCV cannot write the video at all."""
    if _ffmpeg_has_h264():
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
