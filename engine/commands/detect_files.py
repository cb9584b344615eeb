"""The files of detect.py: drawings, labels, tracks, predictions.json and crops."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.commands.detect_drawing import DrawnFrame
from engine.commands.written_files import WrittenFiles, remove_written
from engine.evaluation.coco_classes import coco_category_ids
from engine.inference.results.detection_writer import coco_rows, mot_lines, write_crops, write_yolo_labels
from engine.inference.results.result_names import UniqueStems, class_folders, written_suffix
from engine.inference.results.video_writer import VideoFiles
from engine.inference.sources.frames import Frame
from engine.inference.sources.source_files import source_files
from utils.config.settings import DetectConfig
from utils.detections import DetectionTable
from utils.errors import UserError
from utils.files.new_folder import increment_path
from utils.files.safe_io import atomic_write, write_whole
from utils.labels import image_ids_of
from utils.logger import get_logger
from utils.pixels import as_rgb8
from utils.strings import counted, listed


class ResultFiles:
    """Writes the files that the flags request into ``run_dir``. For the frames of videos, STEM is STEM_FRAME:

    - STEM.jpg or another suffix of images, or STEM.mp4, with the boxes, unless ``nosave``;
    - ``save_txt``: labels/STEM.txt, empty without detections; ``save_conf`` adds the confidence as a sixth number;
      with ``track``: tracks/STEM.txt in MOT Challenge's format, where STEM is a video's or a folder's;
    - ``save_json``: predictions.json, when closed; image ids are stems, or numbers if all stems are numbers; category
      ids are COCO's for a model of its classes, else the numbers of the classes;
    - ``save_crop``: crops/CLASS/STEM_NUMBER.jpg.
    """

    def __init__(self, run_dir: Path, names: tuple[str, ...], config: DetectConfig) -> None:
        self.run_dir = run_dir
        self._names = names
        self._class_folders = class_folders(dict(enumerate(names)))
        self._config = config
        self._stem_of = UniqueStems(source_files(config.source))
        self._videos = VideoFiles(run_dir)
        self._written = WrittenFiles(run_dir)
        self._track_stem_of = UniqueStems()
        self._track_files: set[Path] = set()
        self._last_index: dict[str, int] = {}  # index of the newest frame written, by path
        self._predictions = PredictionsFile(run_dir / "predictions.json") if config.save_json else None
        self._category_ids = coco_category_ids(names) or tuple(range(len(names)))

    def add(self, drawn: DrawnFrame, table: DetectionTable) -> None:
        """Writes the files of a frame."""
        config = self._config
        frame = drawn.detected.frame
        tracks = drawn.detected.tracks
        stem = self._stem_of(frame.path, is_video=frame.is_video)
        frame_stem = f"{stem}_{frame.index:06d}" if frame.is_video else stem
        image = as_rgb8(frame.image)
        if config.save_txt and tracks is not None:
            self._append_tracks(frame.sequence, mot_lines(table, tracks, frame.index))
        elif config.save_txt:
            height, width = image.shape[:2]
            path = self._written.add(self.run_dir / "labels" / f"{frame_stem}.txt")
            write_yolo_labels(path, (height, width), table, scores=config.save_conf)
        if self._predictions is not None:
            rows = coco_rows(
                table,
                names=self._names,
                ids=self._category_ids,
                source=frame.path,
                image_id=frame_stem,
                frame=frame.index if frame.is_video else None,
                tracks=tracks,
            )
            self._predictions.add(frame_stem, rows)
        if config.save_crop:
            folders = [self._class_folders[c] for c in table.classes.tolist()]
            write_crops(
                self.run_dir / "crops",
                frame_stem,
                image,
                table.boxes_xyxy_px,
                folders=folders,
                before_writing=self._written.add,
            )
        if not config.nosave:
            self._add_drawing(drawn, stem)

    def _add_drawing(self, drawn: DrawnFrame, stem: str) -> None:
        frame = drawn.detected.frame
        if not frame.is_video:
            write_whole(self._written.add(self.run_dir / (stem + written_suffix(frame.path))), drawn.encoded)
        elif drawn.drawing is not None:
            self._written.add(self._videos.path_of(stem))
            for _ in range(self._repeats(frame)):
                self._videos.add(stem, drawn.drawing, frame.fps / self._config.vid_stride)

    def _append_tracks(self, sequence: str, lines: str) -> None:
        """Appends the lines of a frame to the file of its sequence, so that an endless stream loses none."""
        path = self.run_dir / "tracks" / f"{self._track_stem_of(sequence, is_video=True)}.txt"
        if path not in self._track_files:
            self._track_files.add(self._written.add(path))
            path.parent.mkdir(exist_ok=True)
            write_whole(path, "")
        with open(path, "a", encoding="utf-8") as file:
            file.write(lines)

    def _repeats(self, frame: Frame) -> int:
        """Returns how many times a frame is written to its video. A frame of a live stream also stands for those that
        were skipped while the model ran, so that the video has the stream's speed."""
        stride = self._config.vid_stride
        last = self._last_index.get(frame.path, frame.index - stride)
        self._last_index[frame.path] = frame.index
        return max(round((frame.index - last) / stride), 1) if frame.is_live else 1

    def warn_of_other_names(self) -> None:
        """Warns of files whose results have another name: moved next to the images, such labels would match no
        image."""
        renamed = self._stem_of.renamed()
        if renamed:
            path, stem = next(iter(renamed.items()))
            get_logger().warning(
                "the results of %s have another name, because another file has the same one or some systems forbid it; "
                "the first: %s -> %s",
                counted(len(renamed), "file"),
                path,
                stem,
            )

    def close(self) -> None:
        """Finishes the files that hold several frames."""
        self._videos.close()
        if self._predictions is not None:
            self._written.add(self._predictions.path)
            with contextlib.closing(self._predictions):
                self._predictions.write()


class PredictionsFile:
    """Collects the rows of predictions.json in a temporary file, so that they need no memory.

    Image ids are the stems, or numbers if all stems are numbers, which is known only after the last image.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows = tempfile.TemporaryFile("w+", encoding="utf-8", dir=path.parent)  # noqa: SIM115 (see `close`)
        self._stems: list[str] | None = []  # stems of all images while each is a number; None: one is not

    def add(self, stem: str, rows: Sequence[dict[str, Any]]) -> None:
        """Adds an image, whose ``rows`` have its stem as image_id."""
        if self._stems is not None:
            self._stems.append(stem)
            if image_ids_of([stem]) == (stem,):
                self._stems = None
        with self._named_errors():
            self._rows.writelines(json.dumps(row) + "\n" for row in rows)

    def write(self) -> None:
        """Writes the file, a list of the rows."""
        ids = dict(zip(self._stems, image_ids_of(self._stems))) if self._stems else {}
        with self._named_errors(), atomic_write(self.path) as file:
            self._rows.seek(0)
            separator = "["
            for line in self._rows:
                row = json.loads(line)
                row["image_id"] = ids.get(row["image_id"], row["image_id"])
                entry = json.dumps([row], ensure_ascii=False, indent=1).removeprefix("[").removesuffix("\n]")
                file.write(f"{separator}{entry}".encode(errors="backslashreplace"))
                separator = ","
            file.write(b"[]" if separator == "[" else b"\n]")

    def close(self) -> None:
        """Removes the temporary file."""
        with contextlib.suppress(OSError):  # a full disk, which `write` has reported
            self._rows.close()

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Attributes errors of the temporary file, which has no name, to ``path``."""
        try:
            yield
        except OSError as error:
            error.filename = error.filename or str(self.path)
            raise


def writes_files(config: DetectConfig) -> bool:
    """Returns whether the flags request any file. A run that writes no files needs no folder, so it takes no folder
    number."""
    return not config.nosave or config.save_txt or config.save_json or config.save_crop


def open_results_folder(config: DetectConfig) -> Path:
    """Creates the folder for the results. With ``--exist-ok``, it removes the files that an earlier run has written
    there, so that they do not mix with the new ones. Raises UserError if a file of the source is in the folder."""
    folder = increment_path(config.project, config.name, config.exist_ok)
    for path in source_files(config.source) if config.exist_ok else ():
        if _is_inside(path, folder):
            raise UserError(
                f"{path}: is in the folder of the results and could be overwritten; choose another --project or --name"
            )
    removed = remove_written(folder)
    if removed:
        get_logger().info("%s: %s of an earlier run removed (--exist-ok)", folder, counted(removed, "file"))
    others = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if others:
        message = "%s: contains files that no run of detect.py has listed; they stay beside the new ones: %s"
        get_logger().warning(message, folder, listed(others))
    return folder


def _is_inside(path: Path, folder: Path) -> bool:
    """Returns whether a file is below ``folder``: it, or the file to which it is a link."""
    root = os.path.realpath(folder)  # Path.resolve would raise for a link to itself
    link = Path(os.path.realpath(path.parent), path.name)
    return link.is_relative_to(root) or Path(os.path.realpath(path)).is_relative_to(root)


def remove_if_empty(folder: Path) -> bool:
    """Removes a folder that has stayed empty, such as that of the crops if nothing was detected, so that its number is
    free again. Returns True if it was removed."""
    try:
        folder.rmdir()
    except OSError:  # there are files in it
        return False
    return True
