"""An albumentations pipeline from the hyper-parameter YAML, seeded for each sample.

    albumentations:
      - {name: Blur, p: 0.1, blur_limit: 3}
      - {name: OneOf, p: 0.3, transforms: [{name: CLAHE}, {name: RandomGamma}]}
      - {name: RandomCrop, height: 300, width: 300, p: 0.2}

Transforms are given by name with their arguments; they may be pixel-level or box-aware. The pipeline runs in the
workers, after the plan of `data.augment` has been rendered, and a result of another size is letterboxed. This module is
therefore part of `data.render`, not of `data.augment`. albumentations (MIT) is imported only if the list is not empty.
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Iterable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from data.augment.labels import MIN_VISIBLE_FRACTION, MIN_VISIBLE_SIDE_PX, to_normalized
from data.images.decode import with_channels
from data.render.letterbox import fit_letterbox, letterbox
from utils.batches import SampleKey
from utils.boxes import clip_xyxy, cxcywh_to_xyxy, scale_boxes
from utils.errors import UserError
from utils.machine.packages import require_package
from utils.pixels import PixelFormat
from utils.rng import Stream, keyed_generator
from utils.schema import suggestion

_ABSTRACT_CLASSES = ("BasicTransform", "DualTransform", "ImageOnlyTransform", "Transform3D", "BaseCompose")


class UserTransforms:
    """The user's pipeline, whose result depends only on the seed, the key and the input."""

    def __init__(self, entries: list[dict], seed: int) -> None:
        """Builds and checks every transform of ``entries``, written as in the module's example.

        Raises UserError if a name or argument is unknown, or a transform rejects a value.
        """
        self.seed = seed
        self._entries = entries
        self._compose = _build(entries)

    def check(self, canvases_hw: Iterable[tuple[int, int]], pixels: PixelFormat) -> None:
        """Applies each entry once, after those that are always applied, to a canvas of each size, with a box and
        without; of ``OneOf``, each of its transforms. Raises UserError for the first that fails."""
        before: list[dict] = []
        for entry, transform in zip(self._entries, self._compose.transforms):
            for choice in entry["transforms"] if entry["name"] == "OneOf" else [entry]:
                compose = _build([*before, _always(choice)])
                for height, width in sorted(canvases_hw):
                    rng = keyed_generator(self.seed, Stream.ALBUMENTATIONS, 0, 0)
                    image = rng.integers(256, size=(height, width, pixels.channels)).astype(pixels.dtype)
                    title = f"{choice['name']} on {width} x {height} pixels of {pixels.channels} channels: "
                    for labels in (np.array([[0, 0.5, 0.5, 0.5, 0.5]], np.float32), np.zeros((0, 5), np.float32)):
                        _apply(compose, image, labels, rng, title)
            if transform.p == 1:
                before.append(entry)

    def __call__(self, image: np.ndarray, labels: np.ndarray, key: SampleKey) -> tuple[np.ndarray, np.ndarray]:
        """Transforms a rendered image (H, W, C) and its labels, float32 (n, 5) of class, cx, cy, w, h normalized.

        A result of another size is letterboxed to the original size. Every visible piece of an ignore region (class
        below 0) is kept. Raises UserError if a transform fails.
        """
        rng = keyed_generator(self.seed, Stream.ALBUMENTATIONS, key.epoch, key.position)
        return _apply(self._compose, image, labels, rng)


def _apply(
    compose: Any, image: np.ndarray, labels: np.ndarray, rng: np.random.Generator, title: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """Implements `UserTransforms.__call__`. ``title`` begins messages."""
    height, width = image.shape[:2]
    boxes = clip_xyxy(scale_boxes(cxcywh_to_xyxy(labels[:, 1:].astype(np.float64)), width, height), width, height)
    compose.set_random_state(rng, random.Random(int(rng.integers(2**63))))
    try:
        result = compose(image=image, bboxes=boxes, rows=np.arange(len(boxes)), regions=labels[:, 0] < 0)
    except Exception as error:  # the user's transforms may raise any error
        raise UserError(f"hyper-parameter albumentations: {title}{_one_line(error)}") from error
    changed = with_channels(np.ascontiguousarray(result["image"]))
    if changed.dtype != image.dtype or changed.ndim != 3 or changed.shape[2] != image.shape[2]:
        raise UserError(
            f"hyper-parameter albumentations: {title}the pipeline returns {changed.dtype} {changed.shape}; "
            "leave out transforms that change the type or the channels"
        )
    # Without a box, a transform that does not support boxes leaves results of shape (0,).
    boxes = np.asarray(result["bboxes"], np.float64).reshape(-1, 4)
    rows = np.asarray(result["rows"]).reshape(-1).astype(np.int64)
    if changed.shape[:2] != (height, width):
        fit = fit_letterbox(changed.shape[:2], (height, width))
        gain_x = fit.width / changed.shape[1]
        gain_y = fit.height / changed.shape[0]
        boxes = boxes * (gain_x, gain_y, gain_x, gain_y) + (fit.pad_x, fit.pad_y, fit.pad_x, fit.pad_y)
        changed = letterbox(changed, (height, width), fit)
    return changed, to_normalized(np.concatenate([labels[rows, :1], boxes], 1), (height, width))


def _always(entry: dict) -> dict:
    """Returns ``entry`` with probability 1, and so its nested transforms."""
    nested = [_always(inner) for inner in entry.get("transforms", [])]
    return entry | {"p": 1} | ({"transforms": nested} if nested else {})


def _build(entries: list[dict]) -> Any:
    """Builds the pipeline of ``entries``. Raises UserError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = require_package("albumentations", "hyper-parameter albumentations", "leave the list empty")
    transforms = [_make(package, entry) for entry in entries]
    bbox_params = package.BboxParams(
        format="pascal_voc",
        label_fields=["rows", "regions"],
        min_visibility=MIN_VISIBLE_FRACTION,
        min_width=MIN_VISIBLE_SIDE_PX,
        min_height=MIN_VISIBLE_SIDE_PX,
        clip=True,
        filter_invalid_bboxes=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # raised if no transform moves boxes
        compose = package.Compose(transforms, bbox_params=bbox_params)
    processor = compose.processors["bboxes"]  # all transforms share it
    processor.filter = partial(_filter_boxes, processor)
    return compose


def _filter_boxes(processor: Any, boxes: np.ndarray, shape: dict[str, int]) -> np.ndarray:
    """Filters objects as albumentations does, but keeps every visible piece of an ignore region, as
    `data.augment.labels.transform_labels` does: the objects in a dropped region would become background.

    ``boxes``: (n, 6) of x1, y1, x2, y2, normalized, the row of the label, and whether it is an ignore region.
    """
    plain_filter = type(processor).filter
    if not len(boxes):
        return plain_filter(processor, boxes, shape)
    is_region = boxes[:, 5] != 0
    regions = boxes[is_region]
    regions[:, :4] = regions[:, :4].clip(0, 1)
    is_visible = (regions[:, 2:4] > regions[:, :2]).all(1)
    return np.concatenate([plain_filter(processor, boxes[~is_region], shape).reshape(-1, 6), regions[is_visible]])


def _make(package: ModuleType, entry: Any) -> Any:
    """Builds a transform, with its nested transforms, from its YAML mapping. Raises UserError."""
    setting = "hyper-parameter albumentations"
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise UserError(f"{setting}: needs mappings such as {{name: Blur, p: 0.1}}, got {entry!r}")
    name = entry["name"]
    transform_classes = _transform_classes(package)
    if name not in transform_classes:
        raise UserError(f"{setting}: no transform is called '{name}'{suggestion(name, transform_classes)}")
    arguments = {key: value for key, value in entry.items() if key != "name"}
    if issubclass(transform_classes[name], package.BaseCompose):
        nested = arguments.get("transforms")
        if not isinstance(nested, list) or not nested:
            raise UserError(f"{setting}: {name} needs a list of transforms under 'transforms'")
        arguments["transforms"] = [_make(package, inner) for inner in nested]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # a warning means that an argument would be ignored
            return transform_classes[name](**arguments)
    except Exception as error:  # such as ZeroDivisionError by a OneOf whose transforms all have p: 0
        raise UserError(f"{setting}: {name}: {_one_line(error)}") from None


def _transform_classes(package: ModuleType) -> dict[str, type]:
    """Returns the classes of transforms by name, without those from which others are only derived."""
    bases = (package.BasicTransform, package.BaseCompose)
    return {
        name: value
        for name, value in vars(package).items()
        if inspect.isclass(value) and issubclass(value, bases) and name not in _ABSTRACT_CLASSES
    }


def _one_line(error: BaseException) -> str:
    """Returns the message of an error on one line, or its type if it has none; pydantic's messages have several."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    summary = [line for line in lines if not line.startswith("For further information")]
    if len(summary) > 2 and "validation error" in summary[0]:
        summary = summary[1:]
    return ": ".join(summary[:2]) or type(error).__name__
