"""What YOLOv5 checkpoints up to release v5.0 hold otherwise than later ones.

They begin with a focus, where later models have the 6x6 convolution that equals it, and store anchors in pixels
(``anchor_grid``) beside the anchors in strides. The YAML that they carry has the focus too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from models.yolox_layout import without_focus

FOCUS = "model.0.conv."  # then conv.weight and bn.… of the convolution inside it
DERIVED = ".anchor_grid"


def is_old_yolov5(tensors: Mapping[str, Tensor]) -> bool:
    return _has_focus(tensors) or any(name.endswith(DERIVED) for name in tensors)


def from_old_yolov5(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As release v6.0 would have written them."""
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(DERIVED)}
    if not _has_focus(kept):
        return kept
    renamed = {f"model.0.{name.removeprefix(FOCUS)}" if name.startswith(FOCUS) else name: kept[name] for name in kept}
    return renamed | {"model.0.conv.weight": without_focus(renamed["model.0.conv.weight"])}


def _has_focus(tensors: Mapping[str, Tensor]) -> bool:
    kernel = tensors.get(f"{FOCUS}conv.weight")
    return kernel is not None and kernel.ndim == 4 and kernel.shape[1:] == (12, 3, 3)


def row_without_focus(row: Any) -> Any:
    """A row of a model YAML, a focus and 3x3 convolution as the 6x6 convolution that equals them."""
    match row:
        case [source, repeats, "Focus", [channels, 3]]:
            return [source, repeats, "Conv", [channels, 6, 2, 2]]
    return row
