"""Output of detect.py and of results: videos, YOLO labels, crops and rows of COCO JSON under unique names; a window."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from utils.boxes import scale_boxes, xyxy_to_cxcywh, xyxy_to_xywh
from utils.detections import DetectionTable
from utils.drawing.draw import write_image
from utils.errors import UserError
from utils.files.safe_io import write_whole
from utils.files.url import url_path

WRITABLE = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"})
SPARE_BYTES = 1 << 20
FRACTION_DIGITS = 9  # digits of fractions in YOLO's labels: 0.00001 px at a size of 10,000
MAX_FOLDER_BYTES = 200  # limit for the name of a class's folder: file systems allow 255
CROP_GAIN = 1.02
CROP_MARGIN_PX = 10
_FRAME = re.compile(r"(.+)_\d{6,}", re.DOTALL)  # the names that detect.py gives to the frames of videos


def written_suffix(path: str) -> str:
    """Returns the suffix of an image's drawing: the image's own, or .jpg for formats that cannot be written."""
    suffix = Path(url_path(path) if "://" in path else path).suffix
    return suffix if suffix.lower() in WRITABLE else ".jpg"


class VideoFiles:
    """Writes frames to mp4 files, one file at a time."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = Path(run_dir)
        self._video: cv2.VideoWriter | None = None
        self._video_path = Path()
        self._size = (0, 0)

    def path_of(self, stem: str) -> Path:
        """Returns the path of a video."""
        return self.run_dir / f"{stem}.mp4"

    def add(self, stem: str, image: np.ndarray, fps: float) -> Path:
        """Appends a frame to STEM.mp4; a frame that differs in size from the first one is resized.

        Raises OSError while the disk still has space for the index of the video: on a full disk, OpenCV would leave a
        file that cannot be played, without an error.
        """
        path = self.path_of(stem)
        if shutil.disk_usage(self.run_dir).free < SPARE_BYTES + image.nbytes:
            self.close()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        video = self._video
        if video is None or path != self._video_path:
            height, width = image.shape[:2]
            video = self._open(path, (height, width), fps)
        if image.shape[1::-1] != self._size:
            image = cv2.resize(image, self._size, interpolation=cv2.INTER_AREA)
        video.write(cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
        return path

    def close(self) -> None:
        """Finishes the open video, which cannot be played before that."""
        if self._video is not None:
            self._video.release()
            self._video = None

    def _open(self, path: Path, hw: tuple[int, int], fps: float) -> cv2.VideoWriter:
        self.close()
        height, width = hw
        self._size = (width, height)
        self._video_path = path
        # OpenCV writes a frame rate as a fraction with powers of ten, whose numerator MPEG-4 limits to 65,535.
        fps = max(round(fps, 1 if fps > 65 else 3), 0.002)
        video = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), fps, self._size)
        if not video.isOpened():
            raise UserError(
                f"{path}: this OpenCV cannot write mp4 videos of {width}x{height} pixels; use --nosave with --save-txt "
                "or --save-json"
            )
        self._video = video
        return video


_INSTEAD_OF_WINDOW = "leave out --view-img, because drawn images are saved anyway; in Python, use save()"


class Window:
    """A window on the screen that shows one image at a time. Raises UserError where none can be opened."""

    NAME = "lockstep"

    def __init__(self) -> None:
        # Without a display, some builds of OpenCV end the process instead of raising.
        if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            raise UserError(f"no window can be opened: there is no display; {_INSTEAD_OF_WINDOW}")
        try:
            cv2.namedWindow(self.NAME, cv2.WINDOW_NORMAL)
        except cv2.error:
            raise UserError(f"this OpenCV cannot open windows (a headless build?); {_INSTEAD_OF_WINDOW}") from None

    def show(self, image: np.ndarray, *, wait: bool) -> bool:
        """Shows ``image`` (RGB); with ``wait``, until a key is pressed. Returns False if the key is q or Esc."""
        cv2.imshow(self.NAME, image[..., ::-1])
        return cv2.waitKey(0 if wait else 1) & 0xFF not in (ord("q"), 27)

    def close(self) -> None:
        cv2.destroyWindow(self.NAME)


class UniqueStems:
    """Assigns a file stem to each source.

    This is the source's own stem, made safe (`safe_name`), with a number appended if two sources share a stem, or if an
    image has the name of a video's frame (STEM_000123). A stem that is numbered or made safe never equals another
    file's stem.
    """

    def __init__(self, files: Iterable[str | Path] = ()) -> None:
        """``files``: those that will be named."""
        self._own = {str(file): Path(file).stem for file in files}  # stems of the files, by path
        self._stems: dict[str, str] = {}  # stems by source
        # Case-folded, because some file systems ignore case:
        self._reserved = {stem.casefold() for stem in self._own.values() if safe_name(stem) == stem}
        self._taken: set[str] = set()
        self._videos: set[str] = set()  # stems of videos
        self._frame_prefixes: set[str] = set()  # STEM of images that are called STEM_000123

    def __call__(self, source: str, *, is_video: bool = False) -> str:
        """Returns the stem of ``source``, always the same one."""
        if source not in self._stems:
            own_stem = _base_of(source, is_video=is_video)
            base = safe_name(own_stem)
            numbered = (f"{base}-{number}" for number in itertools.count(2))
            for stem in itertools.chain([base], numbered):
                is_reserved = stem != own_stem and stem.casefold() in self._reserved
                if not is_reserved and self._take(stem, is_video=is_video):
                    break
            self._stems[source] = stem
        return self._stems[source]

    def renamed(self) -> dict[str, str]:
        """Returns the stems of the files that did not get their own, by path."""
        return {path: stem for path, stem in self._stems.items() if stem != self._own.get(path, stem)}

    def _take(self, stem: str, *, is_video: bool) -> bool:
        """Reserves a stem, unless another source may have the same file names. Returns True on success."""
        key = stem.casefold()
        frame = _FRAME.fullmatch(key)
        if is_video:
            is_free = key not in self._frame_prefixes
        else:
            is_free = frame is None or frame[1] not in self._videos
        if key in self._taken or not is_free:
            return False
        self._taken.add(key)
        if is_video:
            self._videos.add(key)
        elif frame is not None:
            self._frame_prefixes.add(frame[1])
        return True


def _base_of(source: str, *, is_video: bool) -> str:
    if source.isdigit():
        return f"webcam{source}"
    if "://" not in source:
        path = Path(source)
        if path.is_dir():  # a sequence of images; MOT Challenge calls its folders SEQUENCE/img1
            return path.parent.name if path.name == "img1" else path.name
        return path.stem
    name = Path(url_path(source)).stem
    if not name or is_video:
        name = source.split("://", 1)[1]
    return name[:100]


def safe_name(name: str) -> str:
    """Converts ``name`` to a file name without separators, control characters, and characters that some systems
    forbid."""
    return re.sub(r'[\x00-\x1f/\\:*?"<>|@]+', "_", name).strip(". ") or "_"


def class_folders(names: Mapping[int, str]) -> dict[int, str]:
    """Returns a folder name for each class: its name (`safe_name`), cut to `MAX_FOLDER_BYTES`, with a number appended
    if an earlier class has the same folder."""
    folders: dict[int, str] = {}
    taken: set[str] = set()  # case-folded, because some file systems ignore case
    for c, name in names.items():
        base = safe_name(name)
        encoded = base.encode(errors="ignore")
        if len(encoded) > MAX_FOLDER_BYTES:
            base = encoded[:MAX_FOLDER_BYTES].decode(errors="ignore")
        numbered = (f"{base}-{number}" for number in itertools.count(2))
        folder = next(name for name in itertools.chain([base], numbered) if name.casefold() not in taken)
        taken.add(folder.casefold())
        folders[c] = folder
    return folders


def crop_images(image: np.ndarray, boxes_xyxy_px: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the row and the pixels (a view) of each box (N, 4) that is not outside the image. Crops have the margin of
    YOLOv5 and Ultralytics: a side is multiplied by `CROP_GAIN` and lengthened by `CROP_MARGIN_PX`; fractions of pixels
    are cut off."""
    center, side = np.split(xyxy_to_cxcywh(boxes_xyxy_px), 2, 1)
    half = (side * CROP_GAIN + CROP_MARGIN_PX) / 2
    corners = np.concatenate([center - half, center + half], 1).astype(int)  # rounds towards zero
    for row, (x0, y0, x1, y1) in enumerate(corners.tolist()):
        crop = image[max(y0, 0) : max(y1, 0), max(x0, 0) : max(x1, 0)]
        if crop.size:
            yield row, crop


def write_crops(
    folder: Path,
    stem: str,
    image: np.ndarray,
    boxes_xyxy_px: np.ndarray,
    *,
    folders: Sequence[str],
    before_writing: Callable[[Path], object] = lambda path: None,
) -> None:
    """Writes the pixels of boxes (N, 4), as `crop_images` yields them, to FOLDER/CLASS/STEM_ROW.jpg.

    Args:
        folders: CLASS of each box, see `class_folders`.
        before_writing: called with the path of each file.
    """
    for row, crop in crop_images(image, boxes_xyxy_px):
        path = folder / folders[row] / f"{stem}_{row}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        before_writing(path)
        write_image(path, crop)


def write_yolo_labels(
    path: Path,
    image_hw: tuple[int, int],
    table: DetectionTable,
    *,
    scores: bool = False,
    tracks: Sequence[int] | None = None,
) -> None:
    """Writes a line per detection: class, cx cy w h as fractions of the image's size, then the score with ``scores``,
    and the track id with ``tracks``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width = image_hw
    boxes = scale_boxes(xyxy_to_cxcywh(table.boxes_xyxy_px), 1 / width, 1 / height)
    columns = [table.classes[:, None], boxes]
    template = "%d" + f" %.{FRACTION_DIGITS}f" * 4
    if scores:
        columns.append(table.scores[:, None])
        template += " %.6f"
    if tracks is not None:
        columns.append(np.array(tracks, dtype=np.float64)[:, None])
        template += " %d"
    rows = np.concatenate(columns, 1)
    write_whole(path, "".join(template % tuple(row) + "\n" for row in rows.tolist()))


def mot_lines(table: DetectionTable, tracks: np.ndarray, frame: int) -> str:
    """Returns the detections of a frame as lines of a MOT Challenge file: frame, id, left, top, width, height, score
    and three times -1. ``tracks``: ids (N,). ``frame``: counted from 0; the file counts from 1."""
    numbers = np.full(len(tracks), frame + 1)
    boxes = xyxy_to_xywh(table.boxes_xyxy_px)
    rows = np.concatenate([numbers[:, None], tracks[:, None], boxes, table.scores[:, None]], 1)
    template = "{:.0f},{:.0f},{:.3f},{:.3f},{:.3f},{:.3f},{:.6f},-1,-1,-1\n"
    return "".join(template.format(*row) for row in rows.tolist())


def coco_rows(
    table: DetectionTable,
    *,
    names: Sequence[str],
    ids: Sequence[int],
    source: str,
    image_id: str,
    frame: int | None,
    tracks: np.ndarray | None = None,
) -> list[dict[str, Any]]:
    """Converts the detections of an image or frame to rows of predictions.json.

    Args:
        names, ids: names and category ids by class.
        source: path of the image or video.
        image_id: stem of its files; for a frame, with the frame's number.
        frame: number of the frame; None: an image.
        tracks: ids (N,) of tracks, which become track_id.
    """
    boxes = np.round(xyxy_to_xywh(table.boxes_xyxy_px), 3).tolist()
    common: dict[str, Any] = {"image_id": image_id, "file": source}
    if frame is not None:
        common["frame"] = frame
    rows = [
        {**common, "category_id": ids[c], "category": names[c], "bbox": box, "score": round(score, 6)}
        for c, box, score in zip(table.classes.tolist(), boxes, table.scores.tolist())
    ]
    if tracks is not None:
        for row, track in zip(rows, tracks.tolist()):
            row["track_id"] = track
    return rows
