"""Changed pictures: what a full check accepts is read, and Pillow does not refuse it."""

from __future__ import annotations

import io
import re
import struct
import warnings
import zlib
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

from data.images.decode import read_image, read_source, reduced_sizes
from data.images.verify import check_image
from tests.robustness.fuzzing.inputs import change_bytes
from tests.robustness.fuzzing.targets.case import REFUSED, Case, must_work


def images(case: Case) -> str:
    """A changed image: refused by the scan, reported by name when it is used, or one whose change no decoder can
    notice."""
    rng = case.rng
    pictures = case.world.pictures
    path = case.folder / rng.choice(list(pictures))
    same_kind = [d for n, d in pictures.items() if n != path.name and Path(n).suffix == path.suffix]
    data, what = change_bytes(pictures[path.name], rng, same_kind)
    if path.suffix == ".png" and rng.random() < 0.4:
        data = _with_true_sums(data)
        what = f"{what}, CRCs put right"
    case.write(path, (data, what))
    verdict = ""
    for decode in (False, True):
        size = case.attempt(lambda: check_image(path, decode=decode).size_hw)  # noqa: B023 (called at once)
        if size is REFUSED:
            verdict = verdict or REFUSED
            continue
        image = case.attempt(lambda: read_image(path))
        if decode:
            assert image is not REFUSED, "passes a full check, and is refused then"
        if image is REFUSED:
            verdict = REFUSED
            continue
        source_hw = reduced_sizes(np.array([size]), 64)[0]
        with must_work():
            source = read_source(str(path), np.array(size), source_hw)
        assert source.shape == (*source_hw, 3)
        assert image.shape == (*size, 3), f"the scan says {size}, the decoder {image.shape}"
        assert image.dtype == np.uint8
        verdict = check_silence(pictures[path.name], path, what, decode)
    return verdict


def check_silence(original: bytes, path: Path, what: str, is_decoded: bool) -> str:
    data = path.read_bytes()
    if np.array_equal(_directly(data), _directly(original)):
        return "the same pixels"
    assert what != "truncate", "truncated, and other pixels, in silence"
    # The scan detects damage of a decoded JPEG that OpenCV does not report, but not of JPEG 2000 and TIFF.
    problem = _strictly(data) if is_decoded and path.suffix not in (".jp2", ".tif") else ""
    assert not problem, f"Pillow refuses it: {problem}"
    return "other pixels that no decoder complains of"


def _directly(data: bytes) -> np.ndarray | None:
    """Returns the image that OpenCV decodes."""
    try:
        return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error:
        return None


def _strictly(data: bytes) -> str:
    """Returns what Pillow reports about an image, if it means missing or wrong data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data)) as image:
                image.load()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return text if re.search("truncated|broken data stream|not enough image data|bad checksum", text) else ""
    return ""


def _with_true_sums(data: bytes) -> bytes:
    """Returns a PNG with the CRC of each chunk corrected; bytes outside of chunks do not change."""
    out = bytearray(data[:8])
    at = 8
    while at + 12 <= len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        end = at + 8 + length
        if end + 4 > len(data):
            break
        out += data[at:end] + struct.pack(">I", zlib.crc32(data[at + 4 : end]))
        at = end + 4
    return bytes(out) + data[at:]
