"""The image sizes that a model takes."""

from __future__ import annotations

from utils.errors import UserError


def check_image_size(imgsz: int, stride: int, *, min_cells: int = 1, flag: str = "--imgsz") -> None:
    """Raises UserError unless ``imgsz``, the value of ``flag``, is a multiple of the model's largest ``stride``, and at
    least ``min_cells`` times as large."""
    min_size = min_cells * stride
    below = max(imgsz // stride * stride, min_size)
    if imgsz < min_size:
        raise UserError(f"{flag} {imgsz}: too small for the model's stride {stride}; use {min_size} or more")
    if imgsz % stride:
        raise UserError(
            f"{flag} {imgsz}: not a multiple of the model's stride {stride}; use {below} or {below + stride}"
        )
