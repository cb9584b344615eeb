"""Decodes image files to upright 8-bit RGB arrays.

The result does not depend on the OpenCV version: orientation is applied here, not by the decoder. Files are read by
Python, so every path that the system can open works.

- EXIF orientation (JPEG, PNG, WebP) is applied; the decoder applies TIFF's tag.
- Grayscale is repeated over three channels; palettes are expanded.
- 16-bit samples are divided by 257 and rounded, so 0 stays 0 and 65535 becomes 255.
- An alpha channel is dropped; colours are not blended with a background.
- The first picture of an animation or multi-page file is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import cv2
import numpy as np

from data.image_io.headers import Header, coded_data_defect, early_end, plain_jpeg, png_defect, read_header
from utils.decoder_warnings import watched
from utils.errors import UserError
from utils.files.safe_io import read_regular
from utils.machine.limits import explanation

# Lower case. All OpenCV packages on PyPI can decode these.
_SUFFIXES = ".jpg .jpeg .jpe .mpo .png .bmp .dib .webp .tif .tiff .jp2 .pbm .pgm .ppm .pnm"
IMAGE_SUFFIXES = frozenset(_SUFFIXES.split(" "))

_IGNORE_ORIENTATION = cv2.IMREAD_IGNORE_ORIENTATION
_CHECK = cv2.IMREAD_REDUCED_GRAYSCALE_8 | _IGNORE_ORIENTATION
# Older versions of OpenCV decode only to BGR, which needs another pass over the pixels.
_IS_RGB = hasattr(cv2, "IMREAD_COLOR_RGB")
_COLOUR = cv2.IMREAD_COLOR_RGB if _IS_RGB else cv2.IMREAD_COLOR
_REDUCED = {
    2: cv2.IMREAD_REDUCED_GRAYSCALE_2 | _COLOUR,
    4: cv2.IMREAD_REDUCED_GRAYSCALE_4 | _COLOUR,
    8: cv2.IMREAD_REDUCED_GRAYSCALE_8 | _COLOUR,
}
_TO_RGB = {1: cv2.COLOR_GRAY2RGB, 3: cv2.COLOR_BGR2RGB, 4: cv2.COLOR_BGRA2RGB}
_MAX_BYTES = 1 << 31  # of a file

Complain = Callable[[str, str], None]  # called with the path and the decoder's warning about a damaged image


def read_image(path: str | os.PathLike, complain: Complain | None = None) -> np.ndarray:
    """The image at ``path`` as uint8 (H, W, 3) RGB, upright, C-contiguous.

    A damaged JPEG is returned as its decoder could recover it, and ``complain`` is called.

    Raises UserError with the path when the file is missing, unreadable, damaged or of an unsupported kind.
    """
    data, header = _read_file(path)
    return _decode(data, header, path, complain=complain)


def read_reduced(
    path: str | os.PathLike, least_hw: tuple[int, int], complain: Complain | None = None
) -> tuple[np.ndarray, tuple[int, int]]:
    """The image as `read_image` returns it, possibly reduced, and its full upright height and width.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size (by its decoder, from fewer frequencies of each block) if that is
    at least ``least_hw`` and the padding of the last row or column is at most half a pixel. Raises UserError as
    `read_image` does.
    """
    data, header = _read_file(path)
    if header.kind != "jpeg":
        image = _decode(data, header, path, complain=complain)
        return image, image.shape[:2]
    full = _upright(header.size, header.orientation)
    fits = [
        s
        for s in _REDUCED
        if all(-(-side // s) >= least and 2 * (-side % s) <= s for side, least in zip(full, least_hw))
    ]
    return _decode(data, header, path, _REDUCED[max(fits)] if fits else _COLOUR, complain=complain), full


class HiddenDamageError(UserError):
    """Damage that only decoding shows."""


def check_image(path: str | os.PathLike, *, decode: bool = False) -> tuple[int, int]:
    """Checks that `read_image` can read a file without a warning, and returns its upright height and width.

    An ordinary JPEG is not decoded if its header, its end and samples of its coded data are plausible
    (`data.image_io.headers`), unless ``decode``. Any other JPEG must have its end marker (decoders silently fill the
    missing part with grey) and is decoded at an eighth of its size, which is faster. Other kinds are decoded
    completely, and the checksums of a PNG, which decoders ignore, are verified.

    Raises UserError as `read_image` does, and `HiddenDamageError` for damage that only ``decode`` has shown.
    """
    data = _read_bytes(path)
    plain = plain_jpeg(data, data[-2:])
    looks_right = plain is not None and not coded_data_defect(data, plain)
    if looks_right and not decode:
        return _upright(plain.header.size, plain.header.orientation)
    header = _checked_header(data, path)
    complaints: list[str] = []

    def complain(_: str, text: str) -> None:
        complaints.append(text)

    if header.kind != "jpeg":
        defect = png_defect(data) if header.kind == "png" else ""
        size = _decode(data, header, path, complain=complain).shape[:2]
        if defect or complaints:
            raise UserError(f"{path}: damaged image ({defect or complaints[0]})")
        return size
    try:
        _imdecode(data, _CHECK, path, complain)
    except UserError as error:
        raise HiddenDamageError(str(error)) if looks_right else error from None
    if plain is not None and not complaints and (early := early_end(data, plain)):
        complaints.append(early)
    if complaints:
        kind = HiddenDamageError if looks_right else UserError
        raise kind(f"{path}: damaged image ({complaints[0]})")
    return _upright(header.size, header.orientation)


def _read_file(path: str | os.PathLike) -> tuple[bytes, Header]:
    data = _read_bytes(path)
    return data, _checked_header(data, path)


def _checked_header(data: bytes, path: str | os.PathLike) -> Header:
    header = read_header(data)
    if header.defect:
        raise UserError(f"{path}: damaged image ({header.defect})")
    return header


def _read_bytes(path: str | os.PathLike) -> bytes:
    try:
        return read_regular(path, most=_MAX_BYTES)
    except FileNotFoundError:
        raise UserError(f"{path}: no such image") from None
    except OSError as error:
        if explanation(error):  # the disk has failed, the image may be correct
            error.filename = os.fspath(path)
            raise
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _upright(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    height, width = size
    return (width, height) if orientation >= 5 else (height, width)


def _imdecode(data: bytes, flags: int, path: str | os.PathLike, complain: Complain | None = None) -> np.ndarray:
    try:
        image, complaint = watched(lambda: cv2.imdecode(np.frombuffer(data, np.uint8), flags))
    except cv2.error as error:
        if getattr(error, "code", None) == cv2.Error.StsNoMem:  # the image may be correct
            raise MemoryError(error.err) from None
        raise UserError(f"{path}: cannot be decoded ({getattr(error, 'err', error)})") from None
    if image is None:
        raise UserError(f"{path}: cannot be decoded (damaged, or not an image)")
    if complaint and complain is not None:
        complain(os.fspath(path), complaint)
    return image


def _decode(
    data: bytes, header: Header, path: str | os.PathLike, jpeg_flag: int = _COLOUR, complain: Complain | None = None
) -> np.ndarray:
    if header.kind == "jpeg":  # the decoder converts grey and CMYK
        image = _imdecode(data, jpeg_flag | _IGNORE_ORIENTATION, path, complain)
        image = image if _IS_RGB else cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    else:
        image = _to_rgb8(_imdecode(data, cv2.IMREAD_UNCHANGED, path, complain), path)
    return _orient(image, header.orientation)


def _to_rgb8(image: np.ndarray, path: str | os.PathLike) -> np.ndarray:
    if image.dtype == np.uint16:
        image = cv2.convertScaleAbs(image, alpha=1 / 257)
    elif image.dtype != np.uint8:
        raise UserError(f"{path}: {image.dtype} samples are not supported; convert it to 8 or 16 bits")
    channels = 1 if image.ndim == 2 else image.shape[2]
    if channels not in _TO_RGB:
        raise UserError(f"{path}: {channels} channels; supported are 1 (grey), 3 (colour) and 4 (with alpha)")
    return cv2.cvtColor(image, _TO_RGB[channels])


def _orient(image: np.ndarray, orientation: int) -> np.ndarray:
    """Applies an EXIF orientation, 1 to 8."""
    if orientation in (5, 6, 7, 8):
        image = cv2.transpose(image)
    # After transposing 5 to 8: 5 is complete, 6 needs mirrored columns, 8 mirrored rows, 7 both.
    mirror_columns, mirror_rows = orientation in (2, 3, 6, 7), orientation in (3, 4, 7, 8)
    if mirror_columns or mirror_rows:
        image = cv2.flip(image, -1 if mirror_columns and mirror_rows else 1 if mirror_columns else 0)
    return image


def reduced_sizes(image_hw: np.ndarray, imgsz: int) -> np.ndarray:
    """Heights and widths of source images, int32 (N, 2), from those of the files. The shorter side is rounded up."""
    sizes = image_hw.astype(np.int64)
    longest = sizes.max(axis=1, keepdims=True, initial=1)
    reduced = np.minimum(-(-sizes * imgsz // longest), imgsz)
    return np.where(longest > imgsz, reduced, sizes).astype(np.int32)


def read_source(path: str, image_hw: np.ndarray, source_hw: np.ndarray, complain: Complain | None = None) -> np.ndarray:
    """Decodes an image and reduces it to the size ``source_hw``: uint8 (h, w, 3) RGB. ``complain``: see `read_image`.

    Raises:
        UserError: the file cannot be decoded, or its size is not ``image_hw``, that of the index.
    """
    height, width = (int(v) for v in source_hw)
    image, stored_hw = read_reduced(path, (height, width), complain)
    if stored_hw != tuple(image_hw):
        raise UserError(
            f"{path}: is {stored_hw[1]}x{stored_hw[0]} pixels but was {image_hw[1]}x{image_hw[0]} when the data "
            f"set was indexed; it changed during the run, start again"
        )
    if image.shape[:2] == (height, width):
        return image
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
