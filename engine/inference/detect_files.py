"""The files of detect.py, and their names: drawings, videos, labels, tracks, predictions.json and crops."""

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
from typing import Any, BinaryIO

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


class ResultFiles:
    """Writes the files that the flags request into a new folder. NAME is that of `result_names`, and NAME_FRAME for the
    frames of videos:

    - NAME.jpg or another suffix of images, or NAME.mp4, with the boxes, unless ``nosave``;
    - ``save_txt``: labels/NAME.txt, empty without detections; ``save_conf`` adds the confidence as a sixth number;
      with ``track``: tracks/NAME.txt in MOT Challenge's format, where NAME is a video's or a folder's;
    - ``save_json``: predictions.json; image ids are names, or numbers if all names of the source are numbers; category
      ids are COCO's for a model of its classes, else the numbers of the classes;
    - ``save_crop``: crops/CLASS/NAME_NUMBER.jpg; a folder in NAME is above CLASS.
    """

    def __init__(self, class_names: dict[int, str], config: DetectConfig) -> None:
        self.folder: Path | None = None  # created with the first file
        self.note = ""  # about the format of videos
        self._config = config
        files = source_files(config.source)
        target = Path(config.project, config.name).resolve()
        for path in files if config.exist_ok else ():
            # A link may be in the folder, or lead to it.
            if any(place.resolve().is_relative_to(target) for place in (path.parent, path)):
                reason = "is in the folder of the results and could be overwritten"
                raise UserError(f"{path}: {reason}; choose another --project or --name")
        self._category_ids = coco_category_ids(tuple(class_names.values())) or tuple(class_names)
        self._names = result_names(files)
        self._track_names = result_names(_track_path(sequence_of(path)) for path in files)
        names = tuple(self._names.values())
        self._image_ids = {} if any(map(is_video, files)) else dict(zip(names, image_ids_of(names)))
        self._begun_tracks: set[Path] = set()
        self._json: BinaryIO | None = None
        self._video: cv2.VideoWriter | H264Writer | None = None
        self._video_path = Path()
        self._video_size = (0, 0)  # width, height
        self._video_fps = 0.0
        self._video_frames = 0  # number of frames written
        self._newest_bgr: np.ndarray = np.zeros(0)
        self._newest_end_s = 0.0  # in the video

    def add(self, frame: Frame, result: Results, drawing: np.ndarray | None, encoded: bytes) -> None:
        """Writes the files of a frame. ``drawing``: uint8 (H, W, 3) RGB for the frame of a video; ``encoded``: an image
        file."""
        config = self._config
        if config.nosave and not (config.save_txt or config.save_json or config.save_crop):
            return
        if self.folder is None:
            self.folder = increment_path(config.project, config.name, config.exist_ok)
        folder = self.folder
        name = self._names.get(frame.path) or _stream_name(frame.path)
        frame_name = f"{name}_{frame.index:06d}" if frame.is_video else name
        if config.save_txt and result.boxes.is_track:
            track_name = self._track_names.get(_track_path(frame.sequence), name)
            self._add_tracks(_path_in(folder, f"tracks/{track_name}.txt"), frame, result)
        elif config.save_txt:
            result.save_txt(_path_in(folder, f"labels/{frame_name}.txt"), save_conf=config.save_conf)
        if config.save_json:
            self._add_predictions(folder / "predictions.json", frame_name, frame, result)
        if config.save_crop:
            result.save_crop(_path_in(folder, f"crops/{frame_name}").parent, f"{frame_name}.jpg")
        if config.nosave:
            return
        if not frame.is_video:
            write_whole(_path_in(folder, f"{name}{written_suffix(frame.path)}"), encoded)
        elif drawing is not None:
            self._add_to_video(_path_in(folder, f"{name}.mp4"), frame, drawing)

    def _add_tracks(self, path: Path, frame: Frame, result: Results) -> None:
        """Appends the lines of a frame: its number from 1, id, left, top, width, height, score and three times -1."""
        boxes = result.boxes.array.astype(np.float64)
        rows = np.concatenate([boxes[:, 4:5], xyxy_to_xywh(boxes[:, :4]), boxes[:, 5:6]], 1)
        template = f"{frame.index + 1},%d,%.3f,%.3f,%.3f,%.3f,%.6f,-1,-1,-1\n"
        is_begun = path in self._begun_tracks
        with open(path, "ab", opener=open_direct) if is_begun else open_new(path) as file:
            file.write("".join(template % tuple(row) for row in rows.tolist()).encode())
        self._begun_tracks.add(path)

    def _add_predictions(self, path: Path, frame_name: str, frame: Frame, result: Results) -> None:
        """Appends rows to the list in predictions.json, which `close` ends."""
        common: dict[str, Any] = {"image_id": self._image_ids.get(frame_name, frame_name), "file": frame.path}
        if frame.is_video:
            common |= {"frame": frame.index, "time": round(frame.time_s, 3)}
        boxes = result.boxes
        corners = np.round(xyxy_to_xywh(boxes.array[:, :4].astype(np.float64)), 3).tolist()
        scores = boxes.array[:, -2].astype(np.float64).tolist()
        if self._json is None:
            self._json = open_new(path)
            self._json.write(b"[")
        for row, (c, box, score) in enumerate(zip(boxes.classes, corners, scores)):
            category = {"category_id": self._category_ids[c], "category": result.names[c]}
            entry = common | category | {"bbox": box, "score": round(score, 6)}
            if boxes.track_ids is not None:
                entry["track_id"] = boxes.track_ids[row]
            text = json.dumps([entry], ensure_ascii=False, indent=1).removeprefix("[").removesuffix("\n]")
            separator = "," if self._json.tell() > 1 else ""
            self._json.write(f"{separator}{text}".encode(errors="backslashreplace"))

    def _add_to_video(self, path: Path, frame: Frame, image: np.ndarray) -> None:
        """Appends a frame to the video ``path``, resized to the first frame's size.

        The video has a constant frame rate: a frame is repeated until the next one is due, so that the video has the
        speed of its source. Raises OSError while the disk still has space for the index of the video: on a full disk,
        OpenCV would leave a file that cannot be played, without an error.
        """
        if shutil.disk_usage(path.parent).free < SPARE_BYTES + image.nbytes:
            self._close_video()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if self._video is None or path != self._video_path:
            self._close_video()
            height, width = image.shape[:2]
            # OpenCV writes a frame rate as a fraction with powers of ten, whose numerator MPEG-4 limits to 65,535.
            fps = max(round(frame.fps, 1 if frame.fps > 65 else 3), 0.002)
            path.unlink(missing_ok=True)  # OpenCV would write to where it links
            self._video, codec = open_video(path, fps, (width, height))
            if codec == "mp4v":
                self.note = " (videos in MPEG-4 Part 2, which browsers do not play; with ffmpeg installed, in H.264)"
            self._video_path = path
            self._video_size = (width, height)
            self._video_fps = fps
            self._video_frames = 0
        else:
            self._show_until(self._video, frame.time_s)
        if image.shape[1::-1] != self._video_size:
            image = cv2.resize(image, self._video_size, interpolation=cv2.INTER_AREA)
        self._newest_bgr = cv2.cvtColor(image, cv2.COLOR_RGB2BGR)
        self._newest_end_s = frame.end_s

    def _show_until(self, video: cv2.VideoWriter | H264Writer, time_s: float) -> None:
        """Writes the newest frame until the video lasts ``time_s``. It is written once if the video is thereby ahead by
        less than 1.5 frames, and otherwise, where frames follow each other faster than the frame rate, left out."""
        due = time_s * self._video_fps
        repeats = max(round(due) - self._video_frames, int(self._video_frames - due < 0.5))
        for _ in range(repeats):
            video.write(self._newest_bgr)
        self._video_frames += repeats

    def _close_video(self) -> None:
        """Finishes the open video, which cannot be played before that."""
        if self._video is not None:
            self._show_until(self._video, self._newest_end_s)
            self._video.release()
            self._video = None

    def close(self) -> None:
        """Finishes the files that hold several frames."""
        self._close_video()
        if self._json is not None:
            with self._json as file:
                file.write(b"]" if file.tell() == 1 else b"\n]")


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


def _path_in(folder: Path, name: str) -> Path:
    """Returns the path of the file ``name`` below ``folder``, whose own folder exists then and is no link."""
    return folder_below(folder, Path(name).parent) / Path(name).name


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


def _stream_name(source: str) -> str:
    """Names a webcam or URL for its results."""
    if source.isdigit():
        return f"webcam{source}"
    return safe_name(Path(url_path(source)).stem or source.partition("://")[2])[:100]


def _track_path(sequence: str) -> str:
    """Returns the file that stands for a sequence in `result_names`. The images of MOT Challenge's sequences are in
    SEQUENCE/img1."""
    return sequence if is_video(Path(sequence)) else sequence.removesuffix("/img1") + ".txt"
