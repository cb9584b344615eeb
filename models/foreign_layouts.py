"""How other trainers name the tensors of models that we have too, and what becomes of those names here.

Our own names are the public ``model.<layer>.…`` convention of YOLOv5 and its heirs. A trainer with names of its own
gets a `Layout` in ``LAYOUTS``; nothing else needs to know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from models.mit_yolov9_layout import from_mit_yolov9, is_mit_yolov9
from models.yolov5_layout import from_old_yolov5, is_old_yolov5
from models.yolox_layout import from_yolox, image_size_of_yolox, is_yolox

USUAL_IMAGE_SIZE = 640


@dataclass(frozen=True, slots=True)
class Layout:
    """One trainer's names."""

    name: str  # for messages
    fits: Callable[[Mapping[str, Tensor]], bool]
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]  # may also change values: other units, other orders
    image_size: Callable[[Mapping[str, Tensor]], int] = lambda _: USUAL_IMAGE_SIZE  # its public weights' pixels


def _is_prefixed(tensors: Mapping[str, Tensor]) -> bool:
    return bool(tensors) and all(name.startswith("module.") for name in tensors)


def _without_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}


# In this order; each sees what those before it have made.
LAYOUTS: tuple[Layout, ...] = (
    Layout("(Distributed)DataParallel", _is_prefixed, _without_prefix),
    Layout("YOLOv5 up to v5.0", is_old_yolov5, from_old_yolov5),
    Layout("YOLOX", is_yolox, from_yolox, image_size_of_yolox),
    Layout("MultimediaTechLab/YOLO", is_mit_yolov9, from_mit_yolov9),
)


def to_public_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names of the public convention, whoever wrote them."""
    for layout in LAYOUTS:
        if layout.fits(tensors):
            tensors = layout.convert(tensors)
    return tensors


def usual_image_size(tensors: Mapping[str, Tensor]) -> int:
    """The size, pixels, for which weights under their writer's names are meant where the file does not say."""
    sizes = {layout.image_size(tensors) for layout in LAYOUTS if layout.fits(tensors)}
    return min(sizes, default=USUAL_IMAGE_SIZE)
