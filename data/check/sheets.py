"""Contact sheets: one JPEG per kind of issue with its first images, boxes drawn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

from data.check.issues import Issue, by_kind
from data.image_io.decode import read_image
from data.index.dataset_yaml import DatasetSpec
from utils.errors import UserError
from utils.structures import GRAY
from utils.visualize.draw import class_colors, draw_boxes, tile_images, write_image, write_text

TILE = 320  # pixels
TILES, COLUMNS = 20, 5
CONTEXT = 1.5  # times the larger side of an issue's boxes, around them
LEAST_CROP = 64  # pixels
WHITE = np.array([255, 255, 255])


def write_sheets(issues: Sequence[Issue], spec: DatasetSpec, out: Path) -> list[Path]:
    """Writes a sheet for each kind of issue with images to the folder ``out``. Returns their paths.

    Raises UserError when the folder cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be made ({error.strerror})") from None
    sheets = []
    for kind, group in by_kind(issues).items():
        tiles: list[np.ndarray] = []
        for issue in group:
            if len(tiles) >= TILES:
                break
            shown = issue.images[: 1 if issue.boxes or issue.suggestion else 2]  # the first two of near-duplicates
            tiles += [tile for name in shown if (tile := _tile(issue, spec.root / name)) is not None]
        if tiles:
            path = out / (re.sub(r"[^a-z]+", "_", kind) + ".jpg")
            write_image(path, tile_images(tiles[:TILES], COLUMNS))
            sheets.append(path)
    return sheets


def _tile(issue: Issue, path: Path) -> np.ndarray | None:
    """The image, or its part around the boxes, uint8 (320, 320, 3). None if it cannot be read."""
    try:
        image = read_image(path)
    except UserError:
        return None
    labeled = [(box, f"{box.class_name} (label)") for box in issue.boxes]
    boxes = labeled + ([(issue.suggestion, f"{issue.suggestion.class_name}?")] if issue.suggestion else [])
    corners = np.array([box.xyxy_px for box, _ in boxes], np.float64).reshape(-1, 4)
    x0, y0, x1, y1 = _window(corners, *image.shape[:2])
    gain = TILE / max(x1 - x0, y1 - y0)
    size = (max(1, round((x1 - x0) * gain)), max(1, round((y1 - y0) * gain)))
    tile = np.full((TILE, TILE, 3), GRAY, np.uint8)
    tile[: size[1], : size[0]] = cv2.resize(image[y0:y1, x0:x1], size, interpolation=cv2.INTER_AREA)
    corners = (corners - [x0, y0, x0, y0]) * gain
    classes = np.array([box.class_id for box, _ in boxes])
    tile = draw_boxes(tile, corners, [text for _, text in boxes], class_colors(classes), thickness=2, text_size=12)
    score = "" if issue.score is None else f" {issue.score:.2f}"
    write_text(tile, f"{path.name}{score}", (0, TILE), 12, WHITE)
    return tile


def _window(corners: np.ndarray, height: int, width: int) -> tuple[int, int, int, int]:
    """The part of an image to show, x0, y0, x1, y1: around ``corners``, (n, 4) pixels, or all of it if n is 0."""
    if not len(corners):
        return 0, 0, width, height
    low, high = corners[:, :2].min(0), corners[:, 2:].max(0)
    half = max((high - low).max() * (0.5 + CONTEXT), LEAST_CROP) / 2
    x, y = (low + high) / 2
    x0, y0 = int(np.clip(x - half, 0, width - 1)), int(np.clip(y - half, 0, height - 1))
    return x0, y0, int(np.clip(x + half, x0 + 1, width)), int(np.clip(y + half, y0 + 1, height))
