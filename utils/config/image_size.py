"""The image sizes that a model takes."""

from __future__ import annotations

from utils.errors import UserError

MAX_IMGSZ = 65_536  # an image of this size takes 12 GiB, and sizes of larger ones may not fit into 64 bits


def check_image_size(imgsz: int, stride: int, *, min_cells: int = 1, flag: str = "--imgsz") -> None:
    """Raises UserError unless ``imgsz``, the value of ``flag``, is a multiple of the model's largest ``stride``, at
    least ``min_cells`` times as large, and at most `MAX_IMGSZ`."""
    min_size = min_cells * stride
    below = max(imgsz // stride * stride, min_size)
    if imgsz < min_size:
        raise UserError(f"{flag} {imgsz}: too small for the model's stride {stride}; use {min_size} or more")
    if imgsz > MAX_IMGSZ:
        raise UserError(f"{flag} {imgsz}: too large; use {MAX_IMGSZ // stride * stride} or less")
    if imgsz % stride:
        raise UserError(
            f"{flag} {imgsz}: not a multiple of the model's stride {stride}; use {below} or {below + stride}"
        )
