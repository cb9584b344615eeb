"""Which image sizes a model takes."""

from __future__ import annotations

from utils.errors import UserError


def check_image_size(imgsz: int, stride: int, *, least_cells: int = 1) -> None:
    """Raises UserError unless ``imgsz`` is a multiple of the model's largest stride, of ``least_cells`` at least."""
    least = least_cells * stride
    below = max(imgsz // stride * stride, least)
    if imgsz < least:
        raise UserError(f"--imgsz {imgsz}: is too small for the model's stride {stride}; use {least} or more")
    if imgsz % stride:
        raise UserError(
            f"--imgsz {imgsz}: is no multiple of the model's stride {stride}; use {below} or {below + stride}"
        )
