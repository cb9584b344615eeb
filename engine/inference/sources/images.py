"""Converts a program's images (paths, arrays, PIL images, tensors) to arrays in the pixel format of a model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor

from data.images.decode import orient, read_image, to_format, with_channels
from engine.inference.sources.frames import Frame, FrameStream
from engine.inference.sources.source_files import VIDEO_SUFFIXES
from utils.errors import UserError
from utils.pixels import RGB8, PixelFormat

if TYPE_CHECKING:
    from PIL.Image import Image

Source: TypeAlias = "str | os.PathLike[str] | np.ndarray | Image | Tensor"
Color: TypeAlias = Literal["rgb", "bgr"]
CHANNEL_ORDERS = ("rgb", "bgr")
_ORIENTATION_TAG = 0x0112


def as_images(
    source: Source | Sequence[Source], color: Color | None, pixels: PixelFormat = RGB8, *, first_number: int = 0
) -> list[Frame]:
    """Converts the images of ``source``, in order, to ``pixels``. Images that are not files are named by their numbers,
    from ``first_number`` on: image0.jpg, image1.jpg, ...

    - A path names an image file, decoded as `data.images.decode` describes.
    - An array is uint8 or uint16, (H, W), (H, W, 1), (H, W, 3) or (H, W, 4). The last two are in the order ``color``.
    - A PIL image is rotated as its EXIF data says; if it was opened from a file, it has the file's name.
    - A tensor is (C, H, W) or (B, C, H, W) with C = 1 (gray), 3 (RGB) or 4 (RGB and alpha), and uint8, uint16, or float
      in [0, 1], which is rounded to the bits of ``pixels``. A batch counts as B images.
    - A list or tuple holds any of these.
    - For a format with C other channels, arrays are (H, W, C) and tensors (C, H, W). For gray, color is converted.

    An alpha channel is dropped. An RGB array that needs no conversion is not copied. Raises UserError for anything
    else, and for files that cannot be read.
    """
    if color is not None and color not in CHANNEL_ORDERS:
        raise UserError(f"color: must be 'rgb' or 'bgr', got {color!r}")
    frames: list[Frame] = []
    items: Sequence[Source] = source if isinstance(source, list | tuple) else [cast(Source, source)]
    for item in items:
        frames += _frames_of(item, color, pixels, number=first_number + len(frames))
    return frames


def _frames_of(item: Source, color: Color | None, pixels: PixelFormat, *, number: int) -> list[Frame]:
    """Converts an item of a source: one image, or several if it is a batch. ``number``: number of its first image."""
    name = _numbered_name(number)
    if isinstance(item, str | os.PathLike):
        path = os.fspath(item)
        return [Frame(path, _read(path, pixels))]
    if isinstance(item, np.ndarray):
        return [Frame(name, _from_array(item, name, color, pixels))]
    if isinstance(item, Tensor):
        named = [(_numbered_name(i), array) for i, array in enumerate(_from_tensor(item, name, pixels), number)]
        return [Frame(name, _from_array(array, name, "rgb", pixels)) for name, array in named]
    if _is_pillow_image(item):
        name = str(getattr(item, "filename", "")) or name
        return [Frame(name, _from_pillow(item, name, pixels))]
    kinds = "a path, numpy array, PIL image or torch tensor, or one list of these"
    raise UserError(f"{name}: {type(item).__name__} is not an image; give {kinds}")


def _numbered_name(number: int) -> str:
    return f"image{number}.jpg"


def _is_pillow_image(value: object) -> TypeGuard[Image]:
    pillow = sys.modules.get("PIL.Image")  # without the module there can be no PIL image
    return pillow is not None and isinstance(value, pillow.Image)


def as_frames(images: Iterable[Source], color: Color | None, pixels: PixelFormat = RGB8) -> FrameStream:
    """Yields the images of an iterable, converted by `as_images`, as frames."""
    number = 0
    for item in images:
        for frame in as_images(item, color, pixels, first_number=number):
            yield replace(frame, index=number)
            number += 1


def check_many(images: object, method: str) -> None:
    """Raises UserError for anything but an iterable of images, such as one image. ``method``: name of a method of
    `Predictor`."""
    is_one = (isinstance(images, np.ndarray | Tensor) and images.ndim < 4) or _is_pillow_image(images)
    if is_one or not isinstance(images, Iterable):
        kind = "one image" if is_one else type(images).__name__
        raise UserError(f"{method}() needs a video, a stream, a folder or an iterable of images, not {kind}")


def _read(path: str, pixels: PixelFormat) -> np.ndarray:
    if "://" in path:
        raise UserError(f"{path}: images are not downloaded; save it and give the path of the file")
    if Path(path).is_dir():
        raise UserError(f"{path}: is a folder; give a list of files, or use stream() or detect.py")
    if Path(path).suffix.lower() in VIDEO_SUFFIXES:
        raise UserError(f"{path}: is a video; use stream(), which yields a result for each frame, or detect.py")
    return read_image(path, pixels)


def _from_array(array: np.ndarray, name: str, color: Color | None, pixels: PixelFormat) -> np.ndarray:
    if array.ndim not in (2, 3):
        raise UserError(f"{name}: has shape {array.shape}; expected (H, W) or (H, W, channels)")
    if 0 in array.shape:
        raise UserError(f"{name}: an empty array of shape {array.shape}")
    if array.dtype not in (np.uint8, np.uint16):
        raise UserError(f"{name}: an array of {array.dtype}; give uint8, from 0 to 255, or uint16")
    has_color = array.ndim == 3 and array.shape[2] in (3, 4) and array.shape[2] >= pixels.channels
    if has_color and color is None:
        raise UserError(
            f"{name}: the order of an array's colors is unknown; give color='bgr' (images from cv2) or color='rgb'"
        )
    return to_format(array, name, pixels, is_rgb=color == "rgb" or not has_color)


def _from_pillow(image: Image, name: str, pixels: PixelFormat) -> np.ndarray:
    if 0 in image.size:
        raise UserError(f"{name}: an empty image of {image.width}x{image.height} pixels")
    if image.mode in ("I", "F"):
        raise UserError(f"{name}: PIL mode {image.mode} has no defined range; convert it to L or RGB")
    try:
        image.load()  # otherwise PIL decodes a file when its pixels are first needed
        orientation = image.getexif().get(_ORIENTATION_TAG, 1)
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{name}: cannot be decoded ({error})") from None
    if image.mode.startswith("I;16"):
        array = to_format(np.asarray(image).astype(np.uint16), name, pixels)
    else:
        mode = {1: "L", 3: "RGB"}.get(pixels.channels, image.mode)
        try:
            converted = image.convert(mode)
        except ValueError:
            raise UserError(f"{name}: PIL mode {image.mode} cannot be converted to {mode}; convert it first") from None
        array = to_format(np.asarray(converted), name, pixels, is_rgb=True)
    return with_channels(np.ascontiguousarray(orient(array, orientation)))


def _from_tensor(tensor: Tensor, name: str, pixels: PixelFormat) -> np.ndarray:
    """Converts a tensor of images to uint8 or uint16 (B, H, W, channels)."""
    images = tensor.detach()
    if images.ndim == 3:
        images = images[None]
    if images.ndim != 4 or images.shape[1] not in (1, 3, 4, pixels.channels):
        channels = "1, 3 or 4" if pixels.channels in (1, 3, 4) else str(pixels.channels)
        expected = f"(C, H, W) or (B, C, H, W) with {channels} channels"
        raise UserError(f"{name}: a tensor of shape {tuple(tensor.shape)}; expected {expected}")
    if images.is_floating_point():
        if not ((images >= 0) & (images <= 1)).all():
            raise UserError(f"{name}: a float tensor with values outside [0, 1]; divide by 255, or give uint8")
        dtype = torch.uint8 if pixels.bits == 8 else torch.uint16
        images = images.float().mul((1 << pixels.bits) - 1).round_().to(dtype)
    elif images.dtype not in (torch.uint8, torch.uint16):
        raise UserError(f"{name}: a tensor of {images.dtype}; give uint8, uint16, or float in [0, 1]")
    return images.permute(0, 2, 3, 1).contiguous().cpu().numpy()
