"""Writes TIFFs, field by field, for the tests of damaged ones."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from data.image_io.decode import read_image
from utils.pixels import PixelFormat

HW = (40, 56)
FORMATS = (PixelFormat(), PixelFormat(1), PixelFormat(3, 16))
UNKNOWN_TAG = 60000


def directory_entry(content: bytes, tag: int) -> int:
    """Returns the byte at which the entry of a field begins."""
    (directory,) = struct.unpack_from("<I", content, 4)
    (num_entries,) = struct.unpack_from("<H", content, directory)
    entries = [directory + 2 + 12 * number for number in range(num_entries)]
    (entry,) = (entry for entry in entries if struct.unpack_from("<H", content, entry) == (tag,))
    return entry


def strips(
    padding: bytes = b"", surplus: Sequence[int] = (), last_padding: bytes = b""
) -> tuple[np.ndarray, bytearray]:
    """Returns an RGB image, and a TIFF of it in five uncompressed strips.

    ``padding`` follows each strip, and ``last_padding`` is a part of the last one; ``surplus``: numbers of bytes of
    further strips, which the file lists.
    """
    image = np.random.default_rng(0).integers(0, 255, (*HW, 3), np.uint8)
    pieces = [piece.tobytes() for piece in np.split(image, 5)]
    stride = len(pieces[0] + padding)
    pieces[-1] += last_padding
    byte_counts = [*map(len, pieces), *surplus]
    fields = {
        256: [HW[1]],  # ImageWidth
        257: [HW[0]],  # ImageLength
        258: [8, 8, 8],  # BitsPerSample
        259: [1],  # Compression
        262: [2],  # PhotometricInterpretation
        273: [8 + stride * i for i in range(len(byte_counts))],  # StripOffsets
        277: [3],  # SamplesPerPixel
        278: [HW[0] // 5],  # RowsPerStrip
        279: byte_counts,  # StripByteCounts
        317: [1],  # Predictor
    }
    return image, tiff_of(fields, b"".join(piece + padding for piece in pieces))


def tiff_of(fields: dict[int, list[int]], pixels: bytes) -> bytearray:
    """Returns a TIFF with ``pixels`` from byte 8 on. ``fields``: 32-bit values by tag."""
    longer = bytearray()
    entries = bytearray()
    longer_at = 8 + len(pixels)
    for tag, values in fields.items():
        value = values[0]
        if len(values) > 1:
            value = longer_at + len(longer)
            longer += struct.pack(f"<{len(values)}I", *values)
        entries += struct.pack("<HHII", tag, 4, len(values), value)
    header = struct.pack("<2sHI", b"II", 42, longer_at + len(longer))
    return bytearray(header + pixels + longer + struct.pack("<H", len(fields)) + entries + bytes(4))


def rename_field(content: bytearray, tag: int, new_tag: int) -> None:
    struct.pack_into("<H", content, directory_entry(content, tag), new_tag)


def assert_reads(path, content: bytes, image: np.ndarray) -> None:
    """Asserts that OpenCV and tifffile, each of which reads one of the formats, find the same ``image``, uint8."""
    path.write_bytes(content)
    np.testing.assert_array_equal(read_image(path), image)
    np.testing.assert_array_equal(read_image(path, pixels=PixelFormat(3, 16)), image.astype(np.uint16) * 257)
