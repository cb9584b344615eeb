"""Damaged, missing and contradictory fields of a TIFF are refused in one line, and no pixels are read wrong."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from PIL import Image

from data.image_io.decode import read_image
from data.image_io.verify import check_image
from tests.data.image_io.tiff_files import FORMATS, HW, UNKNOWN_TAG, assert_reads, directory_entry, rename_field, strips
from tests.helpers.messages import refused
from utils.errors import UserError
from utils.pixels import PixelFormat

tifffile = pytest.importorskip("tifffile")


HEADER = struct.pack("<2sHI", b"II", 42, 8)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (HEADER[:4], "the header is truncated"),
        (HEADER, "it has no pages"),
        (struct.pack("<2sHI", b"II", 42, 0), "it has no pages"),
        (HEADER + bytes(8), "its pixels have the shape ()"),
    ],
)
@pytest.mark.parametrize("pixels", FORMATS)
def test_a_damaged_directory_is_refused_with_the_reason(tmp_path, content, reason, pixels):
    """The reason says what is missing, whatever exception tifffile raises."""
    path = tmp_path / "a.tif"
    path.write_bytes(content)
    with refused(f"a.tif: cannot be decoded ({reason})"):
        read_image(path, pixels=pixels)


@pytest.mark.parametrize("options", [{"tile": (32, 32)}, {"rowsperstrip": 8}], ids=str)
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_a_damaged_size_takes_no_memory(tmp_path, options, compression):
    """tifffile would fill gigabytes, an image of the stated size, with zeros."""
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.ones((*HW, 3), np.uint16), photometric="rgb", compression=compression, **options)
    content = bytearray(path.read_bytes())
    field = content.index(struct.pack("<HHII", 257, 4, 1, HW[0]))  # ImageLength
    struct.pack_into("<HHII", content, field, 257, 4, 1, 1 << 29)
    path.write_bytes(content)
    with refused("a.tif: cannot be decoded (its size needs ... strips or tiles, the file lists ...)"):
        read_image(path, pixels=PixelFormat(3, 16))


FIELDS = {
    258: "BitsPerSample",
    259: "Compression",
    262: "PhotometricInterpretation",
    277: "SamplesPerPixel",
    284: "PlanarConfiguration",
    317: "Predictor",
    322: "TileWidth",
}


def write_with_changed_field(path, tag: int, position: int) -> None:
    """Writes a compressed RGB image, and flips a bit of the directory entry of ``tag`` at a byte ``position``."""
    image = np.arange(HW[0] * HW[1] * 3, dtype=np.uint8).reshape(*HW, 3)
    options = {"compression": "lzw", "predictor": True, "planarconfig": "contig"}
    tifffile.imwrite(path, image, photometric="rgb", tile=(16, 16) if tag == 322 else None, **options)
    content = bytearray(path.read_bytes())
    content[directory_entry(content, tag) + position] ^= 0x20
    path.write_bytes(content)


@pytest.mark.parametrize("position", [2, 6], ids=["type", "count"])
@pytest.mark.parametrize("tag", FIELDS)
def test_a_damaged_field_is_refused_by_its_name(tmp_path, tag, position):
    """Decoders read the image without the field, by its default: compressed data as pixels, or RGB as gray."""
    write_with_changed_field(tmp_path / "a.tif", tag, position)
    with refused(f"a.tif: cannot be decoded (its field {FIELDS[tag]} is damaged)"):
        read_image(tmp_path / "a.tif")


@pytest.mark.parametrize(
    ("tag", "reason"),
    [
        (259, "it has no field Compression, but is compressed"),
        (262, "it has no field PhotometricInterpretation"),
        (277, "it gives the bits of 3 channels, but has 1 channel"),
    ],
)
def test_a_field_that_is_not_there_is_refused(tmp_path, tag, reason):
    write_with_changed_field(tmp_path / "a.tif", tag, 1)  # another tag
    with refused(f"a.tif: cannot be decoded ({reason})"):
        read_image(tmp_path / "a.tif")


# Flips that nothing in the file contradicts: by field, the bits of its entry.
UNNOTICED = {
    262: {64, 66},  # BlackIsZero becomes WhiteIsZero, and RGB YCbCr
    278: {0, 64},  # RowsPerStrip becomes a second StripByteCounts, or 9, which takes as many strips
    317: set(range(16)),  # without the field Predictor, values are no differences
}


COMMON_FIELDS = (258, 259, 262, 277, 278, 317)


@pytest.mark.parametrize(
    ("channels", "tag"), [(1, tag) for tag in COMMON_FIELDS] + [(3, tag) for tag in (*COMMON_FIELDS, 284)]
)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_no_flipped_bit_of_a_field_changes_pixels_in_silence(tmp_path, dtype, channels, tag):
    """Decoders treat a field with undefined or too many values as missing, and read other pixels."""
    path = tmp_path / "a.tif"
    ramp = np.arange(HW[0] * HW[1] * channels).reshape(*HW, channels) % 251
    image = (ramp * (np.iinfo(dtype).max // 255)).astype(dtype).squeeze()
    photometric = {1: "minisblack", 3: "rgb"}[channels]
    tifffile.imwrite(path, image, photometric=photometric, compression="lzw", predictor=True, rowsperstrip=8)
    expected = read_image(path)
    content = path.read_bytes()
    entry = directory_entry(content, tag)
    for bit in set(range(12 * 8)) - UNNOTICED.get(tag, set()):
        damaged = bytearray(content)
        damaged[entry + bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            values = read_image(path)
        except UserError:
            continue
        np.testing.assert_array_equal(values, expected, err_msg=f"bit {bit}")


@pytest.mark.parametrize(("tag", "needed"), [(322, "1,536"), (323, "4,608")], ids=["TileWidth", "TileLength"])
def test_uncompressed_tiles_of_another_size_than_listed_are_refused(tmp_path, tag, needed):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.zeros((*HW, 3), np.uint8), photometric="rgb", tile=(16, 48))
    content = bytearray(path.read_bytes())
    struct.pack_into("<H", content, directory_entry(content, tag) + 8, 32)
    path.write_bytes(content)
    with refused(f"a.tif: cannot be decoded (its tiles need {needed} bytes, the file lists 2,304)"):
        read_image(path, pixels=PixelFormat(3, 16))


@pytest.mark.parametrize(
    "options",
    [
        {"planarconfig": "contig", "compression": "lzw"},
        {"planarconfig": "separate", "compression": "lzw"},
        {"planarconfig": "separate", "rowsperstrip": 16},
        {"planarconfig": "separate", "tile": (32, 32)},
    ],
)
def test_a_planar_configuration_of_8_bits_is_refused_by_tifffile(tmp_path, options):
    """tifffile reads wrong pixels; OpenCV reads the file."""
    path = tmp_path / "a.tif"
    image = np.random.default_rng(0).integers(0, 255, (*HW, 3), np.uint8)
    stored = image if options["planarconfig"] == "contig" else np.moveaxis(image, -1, 0)
    tifffile.imwrite(path, stored, photometric="rgb", **options)
    content = bytearray(path.read_bytes())
    struct.pack_into("<H", content, directory_entry(content, 284) + 2, 1)  # PlanarConfiguration, BYTE
    path.write_bytes(content)
    assert not np.array_equal(tifffile.imread(path), stored)
    np.testing.assert_array_equal(read_image(path), image)
    with refused("a.tif: cannot be decoded (its field PlanarConfiguration has 8 bits instead of 16)"):
        read_image(path, pixels=PixelFormat(3, 16))


@pytest.mark.parametrize("predictor", [0, 2, 3])
def test_a_predictor_of_uncompressed_pixels_is_ignored(tmp_path, predictor):
    """libtiff does not read the field. tifffile fails on 0 and 3, and takes pixels for differences with 2."""
    image, content = strips()
    struct.pack_into("<I", content, directory_entry(content, 317) + 8, predictor)
    assert_reads(tmp_path / "a.tif", content, image)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_predictor_of_packbits_is_refused(tmp_path, dtype):
    """tifffile writes differences, which libtiff reads as values."""
    path = tmp_path / "a.tif"
    image = np.arange(48 * 64, dtype=dtype).reshape(48, 64)
    tifffile.imwrite(path, image, photometric="minisblack", compression="packbits")
    assert np.array_equal(read_image(path, pixels=PixelFormat(1, image.itemsize * 8))[..., 0], image)
    tifffile.imwrite(path, image, photometric="minisblack", compression="packbits", predictor=True)
    with refused(
        "a.tif: cannot be decoded (its field Predictor is 2, which programs interpret differently for PackBits)"
    ):
        read_image(path, pixels=PixelFormat(1, image.itemsize * 8))


BILEVEL_COMPRESSIONS = {"tiff_ccitt": 2, "group3": 3, "group4": 4, "tiff_raw_16": 32771}


@pytest.mark.parametrize("compression", BILEVEL_COMPRESSIONS)
def test_compressions_of_bilevel_images_have_one_bit_and_no_predictor(tmp_path, compression):
    """libtiff ignores the field Predictor of such files."""
    path = tmp_path / "a.tif"
    is_white = np.random.default_rng(0).random((1, 56)) < 0.5  # libtiff misaligns further rows of tiff_raw_16
    Image.fromarray(is_white).save(path, compression=compression, tiffinfo={UNKNOWN_TAG: 3})
    content = bytearray(path.read_bytes())
    assert struct.unpack_from("<H", content, directory_entry(content, 259) + 8) == (BILEVEL_COMPRESSIONS[compression],)
    rename_field(content, UNKNOWN_TAG, 317)  # Predictor
    path.write_bytes(content)
    np.testing.assert_array_equal(read_image(path), np.repeat(is_white[..., None] * np.uint8(255), 3, axis=2))
    struct.pack_into("<H", content, directory_entry(content, 258) + 8, 8)  # BitsPerSample
    path.write_bytes(content)
    with refused(
        f"a.tif: cannot be decoded (its field Compression is {BILEVEL_COMPRESSIONS[compression]}, which is for "
        "bilevel images)"
    ):
        read_image(path)


@pytest.mark.parametrize("pixels", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_list_of_no_extra_channels_is_no_damage(tmp_path, dtype, pixels):
    path = tmp_path / "a.tif"
    image = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (*HW, 3), dtype)
    tifffile.imwrite(path, image, photometric="rgb", metadata=None, extratags=[(60000, 3, 1, 0, True)])
    expected = read_image(path, pixels=pixels)
    content = path.read_bytes()
    field = struct.pack("<HHI", 60000, 3, 1)
    assert content.count(field) == 1
    path.write_bytes(content.replace(field, struct.pack("<HHI", 338, 3, 0)))
    np.testing.assert_array_equal(read_image(path, pixels=pixels), expected)


def test_too_many_channels_are_counted(tmp_path):
    """The field BitsPerSample, with a value for each of so many channels, is not called damaged."""
    image = np.zeros((*HW, 200), np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", image, photometric="minisblack", planarconfig="contig", metadata=None)
    with refused("a.tif: 200 channels, but the data set or model has 5; correct 'channels' in the YAML, or the image"):
        read_image(tmp_path / "a.tif", pixels=PixelFormat(5))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("rows_per_strip", [None, 1])
def test_a_file_without_the_field_compression_is_uncompressed(tmp_path, dtype, channels, rows_per_strip):
    """Older versions of ImageJ write such files, and the specification's default is no compression."""
    path = tmp_path / "a.tif"
    hw = (150, 4)
    image = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (*hw, channels), dtype)
    photometric = "rgb" if channels == 3 else "minisblack"
    options = {"photometric": photometric, "rowsperstrip": rows_per_strip, "metadata": None}
    tifffile.imwrite(path, image if channels == 3 else image[..., 0], **options)
    expected = read_image(path)
    content = path.read_bytes()
    field = struct.pack("<HHII", 259, 3, 1, 1)
    assert content.count(field) == 1
    path.write_bytes(content.replace(field, struct.pack("<HHII", 60000, 3, 1, 1)))
    np.testing.assert_array_equal(read_image(path), expected)


def test_too_little_memory_is_no_damage(tmp_path, monkeypatch):
    """A scan that ran out of memory would otherwise leave out good images as damaged."""
    path = tmp_path / "a.tif"
    image = np.ones((3, *HW), np.uint16)
    tifffile.imwrite(path, image, photometric="rgb", planarconfig="separate", compression="zlib", rowsperstrip=HW[0])

    def allocate(*args, **kwargs):
        raise MemoryError("Unable to allocate 463. MiB")

    monkeypatch.setattr(tifffile.TiffPage, "asarray", allocate)
    with pytest.raises(MemoryError):
        check_image(path)
    content = path.read_bytes()
    for tag, side in ((256, HW[1]), (257, HW[0]), (278, HW[0])):  # ImageWidth, ImageLength, RowsPerStrip
        field = struct.pack("<HHI", tag, 4, 1)
        content = content.replace(field + struct.pack("<I", side), field + struct.pack("<I", 1 << 15))
    path.write_bytes(content)
    with refused("a.tif: cannot be decoded (not enough memory for its 32,768x32,768 pixels, if that is its size)"):
        check_image(path)
