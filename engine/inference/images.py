"""Converts a program's images (paths, arrays, PIL images, tensors) to arrays in the pixel format of a model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from data.images.decode import StoredImage, read_image, to_format
from engine.inference.sources import VIDEO_SUFFIXES, Frame, FrameStream
from utils.address import as_address
from utils.errors import UserError
from utils.pixels import RGB8, PixelFormat

if TYPE_CHECKING:
    from PIL.Image import Image

Source: TypeAlias = "str | os.PathLike[str] | np.ndarray | Image | Tensor"
Color: TypeAlias = Literal["rgb", "bgr"]
_ORIENTATION_TAG = 0x0112


def frames_of(images: Iterable[Source], color: Color | None, pixels: PixelFormat = RGB8) -> FrameStream:
    """Yields the images, in order, converted to ``pixels``. Images that are not files are named by their numbers:
    image0.jpg, image1.jpg, ...

    - A path names an image file, decoded as `data.images.decode` describes.
    - An array is uint8 or uint16, (H, W), (H, W, 1), (H, W, 3) or (H, W, 4). The last two are in the order ``color``.
    - A PIL image is rotated as its EXIF data says; if it was opened from a file, it has the file's name.
    - A tensor is (C, H, W) or (B, C, H, W) with C = 1 (gray), 3 (RGB) or 4 (RGB and alpha), and uint8, uint16, or float
      in [0, 1], which is rounded to the bits of ``pixels``. A batch counts as B images.
    - For a format with C other channels, arrays are (H, W, C) and tensors (C, H, W). For gray, color is converted.

    An alpha channel is dropped. An RGB array that needs no conversion is not copied. Raises UserError for anything
    else, and for files that cannot be read.
    """
    if color not in (None, "rgb", "bgr"):
        raise UserError(f"color: must be 'rgb' or 'bgr', got {color!r}")
    number = 0
    for item in images:
        file = ""
        name = f"image{number}.jpg"
        if isinstance(item, str | os.PathLike):
            file = os.fspath(item)
            arrays = [_read(file, pixels)]
        elif isinstance(item, np.ndarray):
            arrays = [_from_array(item, name, color, pixels)]
        elif isinstance(item, Tensor):
            arrays = [_from_array(array, name, "rgb", pixels) for array in _from_tensor(item, name, pixels)]
        elif _is_pillow(item):
            file = str(getattr(item, "filename", ""))
            arrays = [_from_pillow(item, file or name, pixels)]
        else:
            kinds = "a path, numpy array, PIL image or torch tensor, or one list of these"
            raise UserError(f"{name}: {type(item).__name__} is not an image; give {kinds}")
        for array in arrays:
            yield Frame(file or f"image{number}.jpg", array, number)
            number += 1


def frames_of_iterable(images: Iterable[Source], color: Color | None, pixels: PixelFormat) -> FrameStream:
    """Returns `frames_of` an iterable. Raises UserError for anything else."""
    is_one = (isinstance(images, np.ndarray | Tensor) and images.ndim < 4) or _is_pillow(images)
    if is_one or not isinstance(images, Iterable):
        kind = "one image" if is_one else type(images).__name__
        raise UserError(f"a video, a stream, a folder or an iterable of images is needed, not {kind}")
    return frames_of(images, color, pixels)


def _is_pillow(value: object) -> bool:
    pillow: Any = sys.modules.get("PIL.Image")  # without the module there can be no PIL image
    return pillow is not None and isinstance(value, pillow.Image)


def _read(path: str, pixels: PixelFormat) -> np.ndarray:
    if "://" in path or Path(path).is_dir() or Path(path).suffix.lower() in VIDEO_SUFFIXES:
        raise UserError(
            f"{as_address(path)}: is not an image file; stream() and detect.py read folders, videos and URLs"
        )
    return read_image(path, pixels)


def _from_array(array: np.ndarray, name: str, color: Color | None, pixels: PixelFormat) -> np.ndarray:
    if array.ndim not in (2, 3) or 0 in array.shape or array.dtype not in (np.uint8, np.uint16):
        raise UserError(
            f"{name}: is {array.dtype} {array.shape}; give (H, W) or (H, W, channels) of uint8, 0 to 255, or uint16"
        )
    has_color = array.ndim == 3 and array.shape[2] in (3, 4) and array.shape[2] >= pixels.channels
    if has_color and color is None:
        raise UserError(
            f"{name}: the order of an array's colors is unknown; give color='bgr' (images from cv2) or color='rgb'"
        )
    return to_format(array, name, pixels, is_rgb=color == "rgb" or not has_color)


def _from_pillow(image: Any, name: str, pixels: PixelFormat) -> np.ndarray:
    mode = {1: "L", 3: "RGB"}.get(pixels.channels, image.mode)
    if 0 in image.size or image.mode in ("I", "F"):
        raise UserError(f"{name}: a PIL image of {image.size} in mode {image.mode} has no defined range; convert it")
    try:
        image.load()  # otherwise PIL decodes a file when its pixels are first needed
        orientation = image.getexif().get(_ORIENTATION_TAG, 1)
        is_deep = image.mode.startswith("I;16")
        array = np.asarray(image).astype(np.uint16) if is_deep else np.asarray(image.convert(mode))
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{name}: cannot be decoded as {mode} ({error})") from None
    return StoredImage(array, is_rgb=True, orientation=orientation).to_format(name, pixels)


def _from_tensor(tensor: Tensor, name: str, pixels: PixelFormat) -> np.ndarray:
    """Converts a tensor of images to uint8 or uint16 (B, H, W, channels)."""
    images = tensor.detach()
    if images.ndim == 3:
        images = images[None]
    is_float = images.is_floating_point()
    if images.ndim != 4 or images.shape[1] not in (1, 3, 4, pixels.channels):
        raise UserError(f"{name}: a tensor of shape {tuple(tensor.shape)}; give (C, H, W) or (B, C, H, W)")
    if is_float and not ((images >= 0) & (images <= 1)).all():
        raise UserError(f"{name}: a float tensor with values outside [0, 1]; divide by 255, or give uint8")
    if not is_float and images.dtype not in (torch.uint8, torch.uint16):
        raise UserError(f"{name}: a tensor of {images.dtype}; give uint8, uint16, or float in [0, 1]")
    if is_float:
        images = images.float().mul((1 << pixels.bits) - 1).round_().to(pixels.torch_dtype)
    return images.permute(0, 2, 3, 1).contiguous().cpu().numpy()
