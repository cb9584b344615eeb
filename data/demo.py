"""Renders the demo data set, shapes on noise, on demand. The same arguments produce the same bytes.

An image is drawn at `SUPERSAMPLE` times its size and downsampled by averaging. An owner map holds the number of the
object visible at each pixel, so that a box encloses the visible part to within half a pixel. Colors are RGB.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np

from utils.errors import UserError
from utils.files.paths import check_output_folder
from utils.files.temporary_folder import creating_folder, replace_path, temporary_folder
from utils.logger import progress
from utils.machine.resources import available_cores
from utils.rng import Stream, keyed_generator

VERSION = 6  # increase it when the images change, so that older copies are rendered again
MARKER = "demo.json"
YAML_NAME = "data.yaml"
_DEMO_SPLITS = ("train", "val")

CLASS_NAMES = ("ring", "ball", "pie", "triangle", "checker")
HOLES = {"ring": 0.55, "triangle": 0.43}  # scale of the hole relative to the outline
STRIPES = np.arange(5, dtype=np.uint8)[:, None] % 2
PATTERNS = {"ball": STRIPES, "checker": STRIPES ^ STRIPES.T}  # 1 where the second color is
SUPERSAMPLE = 2
SMALLEST, TYPICAL, LARGEST = 56 / 320, 96 / 320, 200 / 320
MIN_VISIBLE = 0.75  # visible fraction of an object, below which it is left out or gets no label
MIN_SIDE = 4.0  # pixels of the final image; narrower visible parts get no label


def ensure_demo(root: Path, *, train_images: int = 320, val_images: int = 80, size: int = 320, seed: int = 0) -> Path:
    """Renders the demo set with images of ``size`` x ``size`` pixels into ``root``, unless it is there already, and
    returns its YAML. ``root`` is never left incomplete. Raises UserError if it contains something else or cannot be
    written."""
    wanted = {"version": VERSION, "train": train_images, "val": val_images, "size": size, "seed": seed}
    if _is_complete(root, wanted):
        return root / YAML_NAME
    if root.exists() and not (root / MARKER).exists() and (not root.is_dir() or any(root.iterdir())):
        raise UserError(f"{root}: exists and is not a demo data set; choose an empty or new folder")
    check_output_folder(root.parent)
    try:
        with creating_folder(root.parent), temporary_folder(root) as scratch:
            _write_set(scratch / "set", wanted)
            replace_path(scratch / "set", root)
    except OSError as error:
        raise UserError(f"{root}: cannot write the demo data set ({error.strerror or error})") from None
    return root / YAML_NAME


def _is_complete(root: Path, wanted: dict[str, int]) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return json.loads((root / MARKER).read_text(encoding="utf-8")) == wanted
    return False


def _write_set(folder: Path, wanted: dict[str, int]) -> None:
    for kind in ("images", "labels"):
        for split in _DEMO_SPLITS:
            (folder / kind / split).mkdir(parents=True)
    jobs = [(split, number) for split in _DEMO_SPLITS for number in range(wanted[split])]
    with ThreadPoolExecutor(max_workers=min(available_cores(), 8)) as pool:  # OpenCV and numpy release the GIL
        done = pool.map(lambda job: _write_image(folder, wanted, *job), jobs)
        for _ in progress(done, desc="rendering the demo set", total=len(jobs)):
            pass
    names = "".join(f"  {i}: {name}\n" for i, name in enumerate(CLASS_NAMES))
    yaml_text = f"# Rendered by python -m tools.demo\npath: .\ntrain: images/train\nval: images/val\nnames:\n{names}"
    (folder / YAML_NAME).write_text(yaml_text, encoding="utf-8")
    (folder / MARKER).write_text(json.dumps(wanted), encoding="utf-8")


def _write_image(folder: Path, wanted: dict[str, int], split: str, number: int) -> None:
    image, labels = demo_image(split, number, size=wanted["size"], seed=wanted["seed"])
    _, encoded = cv2.imencode(".jpg", image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 85])
    rows = "".join("{:.0f} {:.6f} {:.6f} {:.6f} {:.6f}\n".format(*row) for row in labels)
    (folder / "images" / split / f"{number:05d}.jpg").write_bytes(encoded.tobytes())
    (folder / "labels" / split / f"{number:05d}.txt").write_text(rows, encoding="ascii")


def demo_image(split: str, number: int, *, size: int = 320, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Renders image ``number`` of a split.

    Returns uint8 (size, size, 3) RGB, and its labels, float64 (n, 5): class, cx, cy, w, h.
    """
    rng = keyed_generator(seed, Stream.DEMO, _DEMO_SPLITS.index(split), number)
    side = size * SUPERSAMPLE
    canvas = render_background(rng, side)
    owner = np.full((side, side), -1, np.int16)
    classes: list[int] = []
    areas: list[float] = []  # pixels, including hidden parts and parts outside the image
    for _ in range(min(2 + int(rng.poisson(3.8)), 10)):
        kind = int(rng.integers(len(CLASS_NAMES)))
        mask, colors, area = _draw_object(CLASS_NAMES[kind], canvas, rng)
        covered = np.where(mask, np.int16(len(classes)), owner)
        visible = np.bincount(covered[covered >= 0], minlength=len(classes) + 1)
        if (visible >= MIN_VISIBLE * np.array([*areas, area])).all():
            canvas[mask] = colors
            owner = covered
            classes.append(kind)
            areas.append(area)
    for _ in range(int(rng.choice(3, p=[0.55, 0.3, 0.15]))):  # bars in front of everything
        start, end = rng.integers(0, side, (2, 2)).tolist()
        width = int(side * rng.uniform(0.005, 0.02)) + 1
        color = rng.uniform(15, 240, 3).tolist()
        cv2.line(canvas, start, end, color, width)
        cv2.line(owner, start, end, -1, width)
    image = cv2.resize(canvas, (size, size), interpolation=cv2.INTER_AREA)
    if rng.random() < 0.3:
        image = cv2.GaussianBlur(image, (0, 0), rng.uniform(0.4, 1.1))
    image = (image - 128) * rng.uniform(0.7, 1.15) + 128 + rng.uniform(-25, 25)
    image += rng.standard_normal(image.shape, np.float32) * rng.uniform(0, 9)
    return image.round().clip(0, 255).astype(np.uint8), visible_boxes(owner, classes, areas)


def render_background(rng: np.random.Generator, side: int) -> np.ndarray:
    """Renders color noise of several scales with semi-transparent polygons and lines: float32 (side, side, 3)."""
    canvas = np.full((side, side, 3), rng.uniform(60, 195, 3), np.float32)
    roughness = rng.uniform(15, 45)
    for octave in range(1, 8):
        noise = rng.standard_normal((2**octave, 2**octave, 3), np.float32) * np.float32(roughness)
        canvas += cv2.resize(noise, (side, side), interpolation=cv2.INTER_LINEAR)
        roughness *= rng.uniform(0.5, 0.9)
    for _ in range(int(rng.integers(4, 14))):
        layer = canvas.copy()
        color = rng.uniform(15, 240, 3).tolist()
        extent = side * np.exp(rng.uniform(np.log(0.02), np.log(0.3)))
        corners = (rng.uniform(0, side, 2) + rng.uniform(-0.6, 0.6, (5, 2)) * extent).astype(np.int32)
        if rng.random() < 0.5:
            cv2.fillConvexPoly(layer, cv2.convexHull(corners), color)
        else:
            cv2.polylines(layer, [corners[:3]], False, color, int(rng.integers(2, 10)))
        opacity = rng.uniform(0.35, 0.85)
        cv2.addWeighted(layer, opacity, canvas, 1 - opacity, 0, dst=canvas)
    return canvas.clip(0, 255)


def _draw_object(name: str, canvas: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, float]:
    """Renders an object at a random position, without changing ``canvas``.

    Returns the mask of its pixels, bool (side, side), their colors, float32 (n, 3), and its whole area in pixels.
    """
    side = len(canvas)
    radius = side / 2 * np.exp(rng.triangular(np.log(SMALLEST), np.log(TYPICAL), np.log(LARGEST)))
    turn = rng.uniform(0, 2 * np.pi)
    squeeze = rng.uniform(0.7, 1.0)
    center = rng.uniform(0.02, 0.98, (2, 1)) * side
    rotation = radius * np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    to_canvas = np.concatenate([rotation * [1.0, squeeze], center], 1)
    is_inside, has_second, area = shape_pixels(name, to_canvas, side)
    # Each color is the best of four random ones: the first differs most from the background, the second from the first.
    colors = [np.array(cv2.mean(canvas, is_inside.astype(np.uint8))[:3], np.float32)]
    for candidates in rng.uniform(15, 240, (2, 4, 3)).astype(np.float32):
        colors.append(candidates[np.linalg.norm(candidates - colors[-1], axis=1).argmax()])
    return is_inside, np.stack(colors[1:])[has_second[is_inside]], area


def shape_pixels(name: str, to_canvas: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Rasterizes the shape of a class on a canvas of ``side`` pixels.

    ``to_canvas``: float (2, 3), maps the square from -1 to 1 to the canvas. Returns the mask of the pixels inside, bool
    (side, side), the mask of the second color, uint8 (side, side), and the whole area in pixels."""
    points = outline(name)
    contours = [points * scale @ to_canvas[:, :2].T + to_canvas[:, 2] for scale in (1.0, HOLES.get(name, 0.0)) if scale]
    mask = np.zeros((side, side), np.uint8)
    cv2.fillPoly(mask, [np.rint((contour - 0.5) * 16).astype(np.int32) for contour in contours], 1, shift=4)
    pattern = PATTERNS.get(name, np.zeros((1, 1), np.uint8))
    rows, columns = pattern.shape
    from_pattern = to_canvas @ [[2 / columns, 0, 1 / columns - 1], [0, 2 / rows, 1 / rows - 1], [0, 0, 1]]
    has_second = cv2.warpAffine(
        pattern, from_pattern, (side, side), flags=cv2.INTER_NEAREST, borderMode=cv2.BORDER_REPLICATE
    )
    area = sum(sign * cv2.contourArea(contour.astype(np.float32)) for sign, contour in zip((1, -1), contours))
    return mask.astype(bool), has_second, area


def outline(name: str) -> np.ndarray:
    """Returns the outline of a class in the square from -1 to 1: float (120, 2)."""
    angle = np.linspace(0, 2 * np.pi, 120, endpoint=False)
    x, y = np.cos(angle), np.sin(angle)
    radius = {
        "pie": np.where(np.abs(angle - np.pi) < 0.7, 0.1, 1.0),
        "triangle": 0.5 / np.cos(angle % (2 * np.pi / 3) - np.pi / 3),
        "checker": 0.9 / np.maximum(np.abs(x), np.abs(y)),
    }.get(name, 1.0)
    return np.stack([radius * x, radius * y], 1)


def visible_boxes(owner: np.ndarray, classes: Sequence[int], areas: Sequence[float]) -> np.ndarray:
    """Returns the labels, float64 (n, 5), of the objects that are sufficiently visible on the owner map."""
    side = len(owner)
    labels = []
    for number, (kind, area) in enumerate(zip(classes, areas)):
        visible = owner == number
        if visible.sum() < max(MIN_VISIBLE * area, 1):
            continue
        columns = np.flatnonzero(visible.any(0))
        rows = np.flatnonzero(visible.any(1))
        width = columns[-1] + 1 - columns[0]
        height = rows[-1] + 1 - rows[0]
        if min(width, height) >= MIN_SIDE * SUPERSAMPLE:
            center_x = (columns[0] + columns[-1] + 1) / 2
            center_y = (rows[0] + rows[-1] + 1) / 2
            labels.append([kind, center_x / side, center_y / side, width / side, height / side])
    return np.array(labels, np.float64).reshape(-1, 5)
