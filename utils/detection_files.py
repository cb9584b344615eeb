"""What detect.py leaves besides pictures: YOLO txt labels, predictions.json and crops, named after their sources."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from utils.boxes import scale_boxes, xyxy_to_cxcywh, xyxy_to_xywh
from utils.drawing import write_image
from utils.structures import DetectionTable
from utils.whole_file import write_whole


class UniqueStems:
    """A file stem for each source: the source's own, with a number where two sources share one."""

    def __init__(self) -> None:
        self._stems: dict[str, str] = {}
        self._taken: set[str] = set()

    def __call__(self, source: str) -> str:
        if source not in self._stems:
            base = f"webcam{source}" if source.isdigit() else _safe_name(_stem_of(source))
            stem, number = base, 1
            while stem.casefold() in self._taken:  # some file systems do not tell A from a
                number += 1
                stem = f"{base}-{number}"
            self._taken.add(stem.casefold())
            self._stems[source] = stem
        return self._stems[source]


def _stem_of(source: str) -> str:
    return source.split("://", 1)[1] if "://" in source else Path(source).stem


def _safe_name(text: str) -> str:
    """``text`` as one file name: without separators, control characters and what some systems forbid."""
    return re.sub(r'[\x00-\x1f/\\:*?"<>|@]+', "_", text).strip(". ") or "_"


class DetectionFiles:
    """Writes the asked-for files of each frame into ``run_dir``; predictions.json when closed."""

    def __init__(
        self,
        run_dir: Path,
        names: tuple[str, ...],
        *,
        save_txt: bool = False,
        save_conf: bool = False,
        save_json: bool = False,
        save_crop: bool = False,
    ) -> None:
        """
        Args:
            names: of the classes.
            save_txt: labels/STEM.txt (STEM_FRAME.txt for videos), empty where nothing was found.
            save_conf: with the confidence as a sixth number in each row.
            save_json: predictions.json.
            save_crop: crops/CLASS/STEM_NUMBER.jpg.
        """
        self.run_dir, self.names = Path(run_dir), names
        self._txt, self._conf, self._json, self._crop = save_txt, save_conf, save_json, save_crop
        self._records: list[dict[str, Any]] = []

    def write(self, source: str, stem: str, frame: int | None, image: np.ndarray, found: DetectionTable) -> None:
        """
        Args:
            source: path or URL of the picture.
            stem: unique to the source.
            frame: number in the video, None for an image.
            image: uint8 (H, W, 3) RGB, original pixels.
            found: detections in this image.
        """
        label = stem if frame is None else f"{stem}_{frame:06d}"
        if self._txt:
            self._write_txt(label, image.shape[:2], found)
        if self._json:
            self._records += self._rows(source, label, frame, found)
        if self._crop:
            self._write_crops(label, image, found)

    def close(self) -> None:
        """Writes predictions.json, whole or not at all."""
        if not self._json:
            return
        write_whole(self.run_dir / "predictions.json", json.dumps(self._records, ensure_ascii=False, indent=1))

    def _write_txt(self, label: str, image_hw: tuple[int, int], found: DetectionTable) -> None:
        folder = self.run_dir / "labels"
        folder.mkdir(exist_ok=True)
        boxes = scale_boxes(xyxy_to_cxcywh(found.boxes_xyxy_px), 1 / image_hw[1], 1 / image_hw[0])
        columns = [found.classes[:, None], boxes] + ([found.scores[:, None]] if self._conf else [])
        rows = np.concatenate(columns, 1)
        form = "%d" + " %.6f" * (rows.shape[1] - 1) + "\n"
        write_whole(folder / f"{label}.txt", "".join(form % tuple(row) for row in rows.tolist()))

    def _rows(self, source: str, label: str, frame: int | None, found: DetectionTable) -> list[dict[str, Any]]:
        boxes = np.round(xyxy_to_xywh(found.boxes_xyxy_px), 3).tolist()
        place = {"image_id": label, "file": source} | ({} if frame is None else {"frame": frame})
        return [
            {**place, "category_id": c, "category": self.names[c], "bbox": box, "score": round(score, 6)}
            for c, box, score in zip(found.classes.tolist(), boxes, found.scores.tolist())
        ]

    def _write_crops(self, label: str, image: np.ndarray, found: DetectionTable) -> None:
        corners = np.concatenate([np.floor(found.boxes_xyxy_px[:, :2]), np.ceil(found.boxes_xyxy_px[:, 2:])], 1)
        for number, (c, (x0, y0, x1, y1)) in enumerate(zip(found.classes.tolist(), corners.astype(int).tolist())):
            crop = image[y0:y1, x0:x1]
            if crop.size:
                folder = self.run_dir / "crops" / _safe_name(self.names[c])
                folder.mkdir(parents=True, exist_ok=True)
                write_image(folder / f"{label}_{number}.jpg", crop)
