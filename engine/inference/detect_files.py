"""The files of detect.py, and their names: drawings, videos, labels, tracks, predictions.json and crops."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import cv2
import numpy as np

from engine.evaluation.coco_classes import coco_category_ids
from engine.inference.results import WRITABLE, Results, numbered, safe_name
from engine.inference.sources import Frame, is_video, source_files
from utils.boxes import xyxy_to_xywh
from utils.config.settings import DetectConfig
from utils.errors import UserError
from utils.files.new_folder import increment_path
from utils.files.safe_io import write_whole
from utils.files.url import url_path
from utils.labels import image_ids_of
from utils.logger import get_logger
from utils.strings import counted

SPARE_BYTES = 1 << 20


class ResultFiles:
    """Writes the files that the flags request into a new folder. For the frames of videos, STEM is STEM_FRAME:

    - STEM.jpg or another suffix of images, or STEM.mp4, with the boxes, unless ``nosave``;
    - ``save_txt``: labels/STEM.txt, empty without detections; ``save_conf`` adds the confidence as a sixth number;
      with ``track``: tracks/STEM.txt in MOT Challenge's format, where STEM is a video's or a folder's;
    - ``save_json``: predictions.json; image ids are stems, or numbers if all stems of the source are numbers; category
      ids are COCO's for a model of its classes, else the numbers of the classes;
    - ``save_crop``: crops/CLASS/STEM_NUMBER.jpg.
    """

    def __init__(self, names: dict[int, str], config: DetectConfig) -> None:
        self.folder: Path | None = None
        self._config = config
        sources = source_files(config.source)
        target = os.path.realpath(Path(config.project, config.name))
        for path in sources if config.exist_ok else ():
            # A link may be in the folder, or lead to it.
            if any(Path(os.path.realpath(place)).is_relative_to(target) for place in (path.parent, path)):
                reason = "is in the folder of the results and could be overwritten"
                raise UserError(f"{path}: {reason}; choose another --project or --name")
        self._category_ids = coco_category_ids(tuple(names.values())) or tuple(names)
        self._stem_of = UniqueStems(sources)
        self._track_stem_of = UniqueStems()
        self._track_files: set[Path] = set()
        self._json: BinaryIO | None = None
        stems = [path.stem for path in sources]
        has_numbers = bool(stems) and not any(map(is_video, sources)) and image_ids_of(stems) != tuple(stems)
        self._image_ids = dict(zip(stems, image_ids_of(stems))) if has_numbers else {}
        self._video: cv2.VideoWriter | None = None
        self._video_path = Path()
        self._video_size = (0, 0)  # width, height
        self._last_index: dict[str, int] = {}  # index of the newest frame written, by path

    def open_folder(self) -> None:
        """Creates the folder, unless there is one, or the flags request no files."""
        config = self._config
        has_files = not config.nosave or config.save_txt or config.save_json or config.save_crop
        if has_files and self.folder is None:
            self.folder = increment_path(config.project, config.name, config.exist_ok)

    def add(self, frame: Frame, result: Results, drawing: np.ndarray | None, encoded: bytes) -> None:
        """Writes the files of a frame. ``drawing``: uint8 (H, W, 3) RGB for the frame of a video; ``encoded``: an image
        file."""
        config = self._config
        folder = self.folder
        if folder is None:
            return
        stem = self._stem_of(frame.path, is_video=frame.is_video)
        frame_stem = f"{stem}_{frame.index:06d}" if frame.is_video else stem
        if config.save_txt and result.boxes.is_track:
            track_stem = self._track_stem_of(frame.sequence, is_video=True)
            self._add_tracks(folder / "tracks" / f"{track_stem}.txt", frame, result)
        elif config.save_txt:
            result.save_txt(folder / "labels" / f"{frame_stem}.txt", save_conf=config.save_conf)
        if config.save_json:
            self._add_predictions(folder / "predictions.json", frame_stem, frame, result)
        if config.save_crop:
            result.save_crop(folder / "crops", f"{frame_stem}.jpg")
        if not config.nosave and not frame.is_video:
            write_whole(folder / (stem + written_suffix(frame.path)), encoded)
        elif not config.nosave and drawing is not None:
            self._add_to_video(folder / f"{stem}.mp4", frame, drawing)

    def _add_tracks(self, path: Path, frame: Frame, result: Results) -> None:
        """Appends the lines of a frame: its number from 1, id, left, top, width, height, score and three times -1."""
        boxes = result.boxes.array.astype(np.float64)
        rows = np.concatenate([boxes[:, 4:5], xyxy_to_xywh(boxes[:, :4]), boxes[:, 5:6]], 1)
        template = f"{frame.index + 1},%d,%.3f,%.3f,%.3f,%.3f,%.6f,-1,-1,-1\n"
        path.parent.mkdir(exist_ok=True)
        with open(path, "a" if path in self._track_files else "w", encoding="utf-8") as file:
            file.write("".join(template % tuple(row) for row in rows.tolist()))
        self._track_files.add(path)

    def _add_predictions(self, path: Path, frame_stem: str, frame: Frame, result: Results) -> None:
        """Appends rows to the list in predictions.json, which `close` ends."""
        common: dict[str, Any] = {"image_id": self._image_ids.get(frame_stem, frame_stem), "file": frame.path}
        if frame.is_video:
            common["frame"] = frame.index
        boxes = result.boxes
        corners = np.round(xyxy_to_xywh(boxes.array[:, :4].astype(np.float64)), 3).tolist()
        scores = boxes.array[:, -2].astype(np.float64).tolist()
        if self._json is None:
            self._json = open(path, "wb")  # noqa: SIM115 (see `close`)
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

        A frame of a live stream also stands for those that were skipped while the model ran, so that the video has the
        stream's speed. Raises OSError while the disk still has space for the index of the video: on a full disk, OpenCV
        would leave a file that cannot be played, without an error.
        """
        if shutil.disk_usage(path.parent).free < SPARE_BYTES + image.nbytes:
            self._close_video()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        stride = self._config.vid_stride
        if self._video is None or path != self._video_path:
            self._close_video()
            height, width = image.shape[:2]
            # OpenCV writes a frame rate as a fraction with powers of ten, whose numerator MPEG-4 limits to 65,535.
            fps = frame.fps / stride
            fps = max(round(fps, 1 if fps > 65 else 3), 0.002)
            video = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), fps, (width, height))
            if not video.isOpened():
                raise UserError(
                    f"{path}: this OpenCV cannot write mp4 videos of {width}x{height} pixels; use --nosave with "
                    "--save-txt or --save-json"
                )
            self._video = video
            self._video_path = path
            self._video_size = (width, height)
        if image.shape[1::-1] != self._video_size:
            image = cv2.resize(image, self._video_size, interpolation=cv2.INTER_AREA)
        bgr = cv2.cvtColor(image, cv2.COLOR_RGB2BGR)
        last = self._last_index.get(frame.path, frame.index - stride)
        self._last_index[frame.path] = frame.index
        for _ in range(max(round((frame.index - last) / stride), 1) if frame.is_live else 1):
            self._video.write(bgr)

    def _close_video(self) -> None:
        """Finishes the open video, which cannot be played before that."""
        if self._video is not None:
            self._video.release()
            self._video = None

    def close(self) -> None:
        """Finishes the files that hold several frames, and warns of files whose results have another name: moved next
        to the images, such labels would match no image."""
        self._close_video()
        if self._json is not None:
            with self._json as file:
                file.write(b"]" if file.tell() == 1 else b"\n]")
        renamed = self._stem_of.renamed
        if renamed:
            path, stem = next(iter(renamed.items()))
            get_logger().warning(
                "the results of %s have another name, because another file has the same one or some systems forbid it; "
                "the first: %s -> %s",
                counted(len(renamed), "file"),
                path,
                stem,
            )


def written_suffix(path: str) -> str:
    """Returns the suffix of an image's drawing: the image's own, or .jpg for formats that cannot be written."""
    suffix = Path(url_path(path) if "://" in path else path).suffix
    return suffix if suffix.lower() in WRITABLE else ".jpg"


class UniqueStems:
    """Assigns each source a file stem of its own: the source's stem, made safe, with a number if it is taken.

    A stem that was changed never equals that of another file, because labels/STEM.txt belongs to that image. Names are
    compared without case, as some file systems do.
    """

    def __init__(self, files: Iterable[str | Path] = ()) -> None:
        """``files``: those that will be named."""
        self.renamed: dict[str, str] = {}  # stems of the files that did not get their own, by path
        self._stems: dict[str, str] = {}  # by source
        self._taken: set[str] = set()
        self._own = {Path(file).stem.casefold() for file in files}

    def __call__(self, source: str, *, is_video: bool = False) -> str:
        """Returns the stem of ``source``, always the same one. Frames of a video are STEM_000123."""
        if source not in self._stems:
            own = _stem_of(source, is_video=is_video)

            def is_free(stem: str) -> bool:
                key = stem.casefold()
                if key in self._taken or (stem != own and key in self._own):
                    return False
                frame = re.escape(key) + r"_\d{6,}"
                return not is_video or not any(re.fullmatch(frame, name) for name in self._own)

            stem = numbered(safe_name(own), is_free)
            self._taken.add(stem.casefold())
            self._stems[source] = stem
            if stem != own and Path(source).stem == own:
                self.renamed[source] = stem
        return self._stems[source]


def _stem_of(source: str, *, is_video: bool) -> str:
    if source.isdigit():
        return f"webcam{source}"
    if "://" in source:
        name = Path(url_path(source)).stem
        return (source.split("://", 1)[1] if is_video or not name else name)[:100]
    path = Path(source)
    if path.is_dir():  # a sequence of images; MOT Challenge calls its folders SEQUENCE/img1
        return path.parent.name if path.name == "img1" else path.name
    return path.stem
