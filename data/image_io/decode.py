"""Image files to upright 8-bit RGB arrays: the only place that decodes pictures.

What comes out is the same for every OpenCV version: orientation is applied here and not by the decoder, and files are
read by Python, so that any path the system can open works.

- EXIF orientation (JPEG, PNG, WebP) is applied; TIFF's own tag is applied by the decoder.
- Grayscale is repeated over three channels; palettes are expanded.
- 16-bit samples are divided by 257 and rounded, so that 0 stays 0 and 65535 becomes 255.
- An alpha channel is dropped: the colours under it are what the network sees.
- Of an animation or a multi-page file the first picture is taken.
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

# Lower case; what every OpenCV build of pip decodes.
_SUFFIXES = ".jpg .jpeg .jpe .mpo .png .bmp .dib .webp .tif .tiff .jp2 .pbm .pgm .ppm .pnm"
IMAGE_SUFFIXES = frozenset(_SUFFIXES.split(" "))

_IGNORE_ORIENTATION = cv2.IMREAD_IGNORE_ORIENTATION
_CHECK = cv2.IMREAD_REDUCED_GRAYSCALE_8 | _IGNORE_ORIENTATION
# Older versions of OpenCV only decode to BGR, which then takes another pass over the pixels.
_IS_RGB = hasattr(cv2, "IMREAD_COLOR_RGB")
_COLOUR = cv2.IMREAD_COLOR_RGB if _IS_RGB else cv2.IMREAD_COLOR
_REDUCED = {
    2: cv2.IMREAD_REDUCED_GRAYSCALE_2 | _COLOUR,
    4: cv2.IMREAD_REDUCED_GRAYSCALE_4 | _COLOUR,
    8: cv2.IMREAD_REDUCED_GRAYSCALE_8 | _COLOUR,
}
_TO_RGB = {1: cv2.COLOR_GRAY2RGB, 3: cv2.COLOR_BGR2RGB, 4: cv2.COLOR_BGRA2RGB}
_MOST_BYTES = 1 << 31  # of a file

Complain = Callable[[str, str], None]  # takes a path and what a decoder has to say of a picture that it mended


def read_image(path: str | os.PathLike, complain: Complain | None = None) -> np.ndarray:
    """The picture at ``path`` as uint8 (H, W, 3) RGB, upright, C-contiguous.

    A JPEG with damaged data comes as far as its decoder could mend it, and ``complain`` is called.

    Raises UserError, naming the path, when the file is missing, unreadable, damaged or of a kind that can't be decoded.
    """
    data = _read_bytes(path)
    header = read_header(data)
    if header.defect:
        raise UserError(f"{path}: damaged image ({header.defect})")
    return _decode(data, header, path, complain=complain)


def read_reduced(
    path: str | os.PathLike, least_hw: tuple[int, int], complain: Complain | None = None
) -> tuple[np.ndarray, tuple[int, int]]:
    """The picture as `read_image` gives it, perhaps decoded smaller, and its height and width in the file, upright.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size (by its decoder, from fewer frequencies of each block) where that
    is at least ``least_hw`` and the padding of the last row or column at most half a pixel. Raises UserError as
    `read_image` does.
    """
    data = _read_bytes(path)
    header = read_header(data)
    if header.defect:
        raise UserError(f"{path}: damaged image ({header.defect})")
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
    """An image whose bytes look right, and of which its decoder complains."""


def check_image(path: str | os.PathLike, *, decode: bool = False) -> tuple[int, int]:
    """Height and width, upright, of a file that `read_image` is sure to read, as good as its bytes tell.

    An ordinary JPEG is not decoded if its header, its end and samples of its coded data look right
    (`data.image_io.headers`), unless ``decode`` asks for it. Any other is searched for its end marker (decoders
    fill the missing part with grey and say nothing) and decoded at an eighth of its size, which saves most of the
    arithmetic; there must be no complaint. Other kinds are decoded whole, without a complaint, and the checksums of a
    PNG must be right, at which decoders do not look.

    Raises UserError as `read_image` does, `HiddenDamageError` for what only ``decode`` has shown.
    """
    data = _read_bytes(path)
    plain = plain_jpeg(data, data[-2:])
    looks_right = plain is not None and not coded_data_defect(data, plain)
    if looks_right and not decode:
        return _upright(plain.header.size, plain.header.orientation)
    header = read_header(data)
    if header.defect:
        raise UserError(f"{path}: damaged image ({header.defect})")
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


def _read_bytes(path: str | os.PathLike) -> bytes:
    try:
        return read_regular(path, most=_MOST_BYTES)
    except FileNotFoundError:
        raise UserError(f"{path}: no such image") from None
    except OSError as error:
        if explanation(error):  # no fault of the image's
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
        if getattr(error, "code", None) == cv2.Error.StsNoMem:  # no fault of the image's
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
    if header.kind == "jpeg":  # the decoder itself turns grey and CMYK into colour
        image = _imdecode(data, jpeg_flag | _IGNORE_ORIENTATION, path, complain)
        image = image if _IS_RGB else cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    else:
        image = _to_rgb8(_imdecode(data, cv2.IMREAD_UNCHANGED, path, complain), path)
    return _orient(image, header.orientation)


def _to_rgb8(image: np.ndarray, path: str | os.PathLike) -> np.ndarray:
    if image.dtype == np.uint16:
        image = cv2.convertScaleAbs(image, alpha=1 / 257)
    elif image.dtype != np.uint8:
        raise UserError(f"{path}: {image.dtype} samples have no agreed range; convert it to 8 or 16 bits")
    channels = 1 if image.ndim == 2 else image.shape[2]
    if channels not in _TO_RGB:
        raise UserError(f"{path}: {channels} channels; 1 (grey), 3 (colour) or 4 (colour and alpha) can be read")
    return cv2.cvtColor(image, _TO_RGB[channels])


def _orient(image: np.ndarray, orientation: int) -> np.ndarray:
    """The stored picture turned upright: EXIF says on which sides the stored first row and column belong."""
    if orientation in (5, 6, 7, 8):
        image = cv2.transpose(image)
    # After transposing 5..8: 5 is done, 6 wants columns mirrored, 7 both, 8 rows.
    mirror_columns, mirror_rows = orientation in (2, 3, 6, 7), orientation in (3, 4, 7, 8)
    if mirror_columns or mirror_rows:
        image = cv2.flip(image, -1 if mirror_columns and mirror_rows else 1 if mirror_columns else 0)
    return image


def reduced_sizes(image_hw: np.ndarray, imgsz: int) -> np.ndarray:
    """Heights and widths int32 (N, 2) of source images, from those of the files. The shorter side rounds up."""
    sizes = image_hw.astype(np.int64)
    longest = sizes.max(axis=1, keepdims=True, initial=1)
    reduced = np.minimum(-(-sizes * imgsz // longest), imgsz)
    return np.where(longest > imgsz, reduced, sizes).astype(np.int32)


def read_source(path: str, image_hw: np.ndarray, source_hw: np.ndarray, complain: Complain | None = None) -> np.ndarray:
    """Decodes and reduces one image: uint8 (h, w, 3) RGB of size ``source_hw``. ``complain``: see `read_image`.

    Raises:
        UserError: the file cannot be decoded, or is no longer of the size ``image_hw`` that was indexed.
    """
    height, width = (int(v) for v in source_hw)
    image, stored_hw = read_reduced(path, (height, width), complain)
    if stored_hw != tuple(image_hw):
        raise UserError(
            f"{path}: is {stored_hw[1]}x{stored_hw[0]} pixels but was {image_hw[1]}x{image_hw[0]} when the data "
            f"set was indexed; it changed during the run: start again"
        )
    if image.shape[:2] == (height, width):
        return image
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
