"""Changed pictures: if one is accepted silently, neither OpenCV, called directly, nor Pillow may complain about it."""

from __future__ import annotations

import io
import os
import re
import struct
import tempfile
import warnings
import zlib
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

from data.image_io.decode import read_image
from data.image_io.reduce import read_source, reduced_sizes
from data.image_io.verify import check_image
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
        complaints: list[str] = []
        image = case.attempt(lambda: read_image(path, lambda p, text: complaints.append(f"{p}: {text}")))  # noqa: B023
        if decode:
            assert image is not REFUSED, "passes a full check, and is refused then"
            assert not complaints, f"passes a full check, then: {complaints}"
        if image is REFUSED:
            verdict = REFUSED
            continue
        source_hw = reduced_sizes(np.array([size]), 64)[0]
        with must_work():
            source = read_source(str(path), np.array(size), source_hw)
        assert source.shape == (*source_hw, 3)
        assert image.shape == (*size, 3), f"the scan says {size}, the decoder {image.shape}"
        assert image.dtype == np.uint8
        assert not complaints or path.name in complaints[0]
        verdict = (
            "complained of by name" if complaints else check_silence(pictures[path.name], path, image, what, decode)
        )
    return verdict


def check_silence(original: bytes, path: Path, image: np.ndarray, what: str, is_decoded: bool) -> str:
    data = path.read_bytes()
    pixels, printed = _directly(data)
    if pixels is None:  # a TIFF with a damaged tag that only libtiff, and not tifffile, needs
        assert path.suffix == ".tif", "OpenCV alone does not decode it"
        assert np.array_equal(image, _directly(original)[0]), "OpenCV alone does not decode it, and other pixels"
        return "the same pixels"
    assert not re.search(r"Corrupt JPEG|Premature end|libpng error|(?i:error|truncated|corrupt)", printed), printed
    if np.array_equal(pixels, _directly(original)[0]):
        return "the same pixels"
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        assert _with_true_sums(data) == data, "a wrong CRC in a PNG"
    assert what != "truncate", "truncated, and other pixels, in silence"
    # The scan detects damage of a decoded JPEG that OpenCV does not report, but not of JPEG 2000.
    problem = _strictly(data) if is_decoded and path.suffix != ".jp2" else ""
    assert not problem, f"Pillow refuses it: {problem}"
    return "other pixels that no decoder complains of"


def _directly(data: bytes) -> tuple[np.ndarray | None, str]:
    """Returns the image that OpenCV decodes, and what it prints meanwhile."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED | cv2.IMREAD_IGNORE_ORIENTATION)
        except cv2.error:
            image = None
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        return image, file.read().decode("latin-1")


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
