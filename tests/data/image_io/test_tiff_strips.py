"""Strips of a TIFF that contradict its size are refused; those that decoders read in one piece are read."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from data.image_io.decode import read_image
from tests.data.image_io.tiff_files import HW, UNKNOWN_TAG, assert_reads, directory_entry, rename_field, strips, tiff_of
from tests.helpers.messages import refused
from utils.pixels import PixelFormat

tifffile = pytest.importorskip("tifffile")


@pytest.mark.parametrize("layout", [{}, {"last_padding": b"\xff" * 2}, {"surplus": [0]}], ids=str)
def test_uncompressed_strips_without_their_number_of_rows_are_read(tmp_path, layout):
    image, content = strips(**layout)
    rename_field(content, 278, UNKNOWN_TAG)  # RowsPerStrip
    assert_reads(tmp_path / "a.tif", content, image)


def test_strips_with_gaps_need_their_number_of_rows(tmp_path):
    """Decoders take the bytes between the strips for pixels."""
    path = tmp_path / "a.tif"
    image, content = strips(padding=b"\xff" * 6)
    assert_reads(path, content, image)
    rename_field(content, 278, UNKNOWN_TAG)  # RowsPerStrip
    path.write_bytes(content)
    with refused("a.tif: cannot be decoded (its first strip needs 6,720 bytes, the file lists 1,344)"):
        read_image(path)


def test_strips_without_their_number_of_rows_are_all_needed(tmp_path):
    """The length of the image may be damaged."""
    path = tmp_path / "a.tif"
    _, content = strips(surplus=[1344])
    rename_field(content, 278, UNKNOWN_TAG)  # RowsPerStrip
    path.write_bytes(content)
    with refused("a.tif: cannot be decoded (its first strip needs 6,720 bytes, the file lists 1,344)"):
        read_image(path)


@pytest.mark.parametrize("num_missing", [1, 2])
def test_strips_without_their_number_of_rows_are_not_cropped(tmp_path, num_missing):
    """The rows that a damaged length lacks look like padding of the last strip."""
    path = tmp_path / "a.tif"
    _, content = strips()
    rename_field(content, 278, UNKNOWN_TAG)  # RowsPerStrip
    struct.pack_into("<I", content, directory_entry(content, 257) + 8, HW[0] - num_missing)  # ImageLength
    path.write_bytes(content)
    with refused("a.tif: cannot be decoded (its first strip needs ... bytes, the file lists 1,344)"):
        read_image(path)


def test_one_strip_of_all_planes_is_refused(tmp_path):
    """OpenCV would read the first plane, and two of other pixels."""
    path = tmp_path / "a.tif"
    planes = np.random.default_rng(0).integers(0, 255, (3, *HW), np.uint8)
    fields = {
        256: [HW[1]],  # ImageWidth
        257: [HW[0]],  # ImageLength
        258: [8, 8, 8],  # BitsPerSample
        259: [1],  # Compression
        262: [2],  # PhotometricInterpretation
        273: [8],  # StripOffsets
        277: [3],  # SamplesPerPixel
        279: [planes.nbytes],  # StripByteCounts
        284: [2],  # PlanarConfiguration
    }
    path.write_bytes(tiff_of(fields, planes.tobytes()))
    with refused("a.tif: cannot be decoded (its size needs 3 strips or tiles, the file lists 1)"):
        read_image(path)


def test_a_number_of_rows_that_became_an_orientation_is_refused(tmp_path):
    """The tags differ by a bit, and the image would be turned."""
    path = tmp_path / "a.tif"
    _, content = strips()
    rename_field(content, 278, 274)  # RowsPerStrip, Orientation
    path.write_bytes(content)
    with refused("a.tif: cannot be decoded (its first strip needs 6,720 bytes, the file lists 1,344)"):
        read_image(path)


@pytest.mark.parametrize("surplus_bytes", [0, 1344])
def test_only_a_surplus_strip_without_bytes_is_ignored(tmp_path, surplus_bytes):
    """A strip with bytes may be a part of the image, whose length is damaged then."""
    path = tmp_path / "a.tif"
    image, content = strips(surplus=[surplus_bytes])
    if not surplus_bytes:
        assert_reads(path, content, image)
        return
    path.write_bytes(content)
    with refused("a.tif: cannot be decoded (its size needs 5 strips or tiles, the file lists 6)"):
        read_image(path)


@pytest.mark.parametrize("pixels", [PixelFormat(), PixelFormat(3, 16)], ids=str)
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_planes_need_their_numbers_of_bytes(tmp_path, compression, pixels):
    """tifffile fills the planes without one with zeros."""
    path = tmp_path / "a.tif"
    image = np.random.default_rng(0).integers(0, 1 << 16, (3, *HW), np.uint16)
    tifffile.imwrite(path, image, photometric="rgb", planarconfig="separate", compression=compression)
    content = bytearray(path.read_bytes())
    rename_field(content, 279, UNKNOWN_TAG)  # StripByteCounts
    path.write_bytes(content)
    with refused("a.tif: cannot be decoded (its size needs 3 strips or tiles, the file lists 1)"):
        read_image(path, pixels=pixels)


@pytest.mark.parametrize(("num_bytes", "is_read"), [(280, True), (282, True), (560, False), (2240, False)])
def test_bilevel_strips_may_be_padded(tmp_path, num_bytes, is_read):
    """Without the field BitsPerSample only the number of bytes tells one bit per pixel from 2 or 8."""
    path = tmp_path / "a.tif"
    is_white = np.random.default_rng(0).random(HW) < 0.5
    fields = {256: [HW[1]], 257: [HW[0]], 259: [1], 262: [1], 273: [8], 277: [1], 278: [HW[0]], 279: [num_bytes]}
    content = tiff_of(fields, np.packbits(is_white, axis=1).tobytes().ljust(num_bytes, b"\0"))
    if is_read:
        assert_reads(path, content, np.repeat(is_white[..., None] * np.uint8(255), 3, axis=2))
        return
    path.write_bytes(content)
    with refused("a.tif: cannot be decoded (it has no field BitsPerSample, but is not bilevel)"):
        read_image(path)
