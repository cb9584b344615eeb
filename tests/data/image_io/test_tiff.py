"""Every kind of TIFF is read as it was written, or refused in one line."""

from __future__ import annotations

import itertools
import struct
import sys
from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np
import pytest
from PIL import Image

from data.image_io.decode import read_image
from data.image_io.reduce import read_reduced
from data.image_io.verify import check_image
from tests.helpers.messages import refused
from utils.errors import UserError
from utils.pixels import PixelFormat

tifffile = pytest.importorskip("tifffile")

HW = (40, 56)
GRAY = ("minisblack", "miniswhite")
FORMATS = (PixelFormat(), PixelFormat(1), PixelFormat(3, 16))


class Kind(NamedTuple):
    """The pixel format that the tags of a TIFF declare."""

    photometric: str
    bits: int
    channels: int
    extra: tuple[int, ...] = ()  # 0: unspecified; 1 and 2: alpha

    @property
    def is_refused(self) -> bool:
        """Whether some layouts or pixel formats may be refused."""
        is_strange_gray = self.photometric == "miniswhite" and self.channels > 1
        return is_strange_gray or self.photometric == "separated" or (self.extra == (0,) and self.channels == 2)


KINDS = [
    *(Kind(gray, bits, 1) for gray in GRAY for bits in (1, 2, 4, 8, 16)),
    *(Kind(gray, bits, 2, (alpha,)) for gray in GRAY for bits in (8, 16) for alpha in (0, 1, 2)),
    *(Kind(gray, bits, n, (0,) * (n - 1)) for gray in GRAY for bits in (8, 16) for n in (3, 4)),
    *(Kind("rgb", bits, 3) for bits in (8, 16)),
    *(Kind("rgb", bits, 4, (alpha,)) for bits in (8, 16) for alpha in (0, 1, 2)),
    Kind("palette", 8, 1),
    Kind("separated", 8, 4),
]


def write(path, kind: Kind, *, planar: str, tile: tuple[int, int] | None, orientation: int) -> np.ndarray:
    """Writes random samples; returns them as upright 8-bit RGB."""
    rng = np.random.default_rng(0)
    max_value = (1 << kind.bits) - 1
    samples = rng.integers(0, max_value + 1, (*HW, kind.channels), np.uint16 if kind.bits == 16 else np.uint8)
    options = {"photometric": kind.photometric, "tile": tile, "metadata": None}
    options["extratags"] = [(274, 3, 1, orientation, True)]
    if kind.bits < 8:
        options["bitspersample"] = kind.bits
    if kind.channels > 1:
        options |= {"planarconfig": planar, "extrasamples": kind.extra}
    colors = rng.integers(0, 256, (256, 3), np.uint16)
    if kind.photometric == "palette":
        options["colormap"] = colors.T * 257
    stored = samples if planar == "contig" else np.moveaxis(samples, -1, 0)
    tifffile.imwrite(path, stored if kind.channels > 1 else samples[..., 0], **options)
    fractions = samples / max_value
    if kind.photometric == "palette":
        rgb = colors[samples[..., 0]] / 255
    elif kind.photometric == "separated":
        rgb = (1 - fractions[..., :3]) * (1 - fractions[..., 3:])
    elif kind.channels >= 3:
        rgb = fractions[..., :3]
    else:
        rgb = np.repeat(fractions[..., :1] if kind.photometric == "minisblack" else 1 - fractions[..., :1], 3, 2)
    if orientation == 6:  # the stored rows are the columns, from the right
        rgb = np.rot90(rgb, -1)
    return np.rint(rgb * 255).astype(np.uint8)


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("photometric", ["minisblack", "miniswhite", "rgb", "palette", "separated"])
def test_no_kind_is_read_wrong(tmp_path, photometric, orientation):
    path = tmp_path / "a.tif"
    for kind in (kind for kind in KINDS if kind.photometric == photometric):
        for planar, tile in itertools.product(("contig", "separate")[: kind.channels], (None, (32, 32))):
            rgb = write(path, kind, planar=planar, tile=tile, orientation=orientation)
            for pixels in FORMATS:
                try:
                    image = read_image(path, pixels=pixels)
                except UserError:
                    if not kind.is_refused:
                        raise
                    with pytest.raises(UserError):
                        check_image(path, pixels=pixels)
                    continue
                expected = rgb if pixels.channels == 3 else cv2.cvtColor(rgb, cv2.COLOR_RGB2GRAY)[..., None]
                image = image if pixels.bits == 8 else np.rint(image / 257)
                message = f"{kind} {planar} {tile} {pixels}"
                np.testing.assert_allclose(image, expected.astype(int), atol=2, err_msg=message)
                checked = check_image(path, pixels=pixels)
                assert checked.size_hw == rgb.shape[:2]
                assert checked.orientation == orientation


def test_planes_of_16_bits_need_tifffile(tmp_path, monkeypatch):
    """OpenCV would read one plane for all channels; GDAL writes such files."""
    image = np.zeros((3, *HW), np.uint16)
    image[:] = np.array([40000, 20000, 0]).reshape(3, 1, 1)
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, image, photometric="rgb", planarconfig="separate", metadata=None)
    assert read_image(path)[0, 0].tolist() == [156, 78, 0]
    assert read_reduced(path, HW)[0][0, 0].tolist() == [156, 78, 0]
    monkeypatch.setitem(sys.modules, "tifffile", None)
    message = (
        "a.tif: reading this kind of TIFF: the package tifffile is not installed; pip install tifffile, or save it "
        "as PNG or .npy"
    )
    for refuse in (read_image, check_image):
        with refused(message):
            refuse(path)


COMPRESSIONS = {"zstd": "ZSTD", "lzma": "LZMA", "webp": "WebP", "jpeg2000": "JPEG 2000", "png": "compression 34933"}


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_compressions_that_opencv_lacks_need_packages(tmp_path, monkeypatch, compression):
    pytest.importorskip("imagecodecs")
    path = tmp_path / "a.tif"
    image = np.full((*HW, 3), [200, 40, 10], np.uint8)
    tifffile.imwrite(path, image, photometric="rgb", compression=compression, metadata=None)
    np.testing.assert_allclose(read_image(path).astype(int), image, atol=1)
    assert check_image(path).size_hw == HW
    monkeypatch.setattr(type(tifffile.TIFF.DECOMPRESSORS), "__contains__", lambda *_: False)
    for package in ("imagecodecs", "tifffile"):
        monkeypatch.setitem(sys.modules, package, None)
        message = (
            f"a.tif: reading a TIFF with {COMPRESSIONS[compression]}: the package {package} is not installed; "
            f"pip install {package}, or save it as PNG or .npy"
        )
        for refuse in (read_image, check_image):
            with refused(message):
                refuse(path)


def test_an_unknown_compression_is_refused_in_one_line(tmp_path):
    pytest.importorskip("imagecodecs")
    path = tmp_path / "a.tif"
    Image.new("RGB", HW).save(path)
    content = path.read_bytes()
    uncompressed, unknown = (struct.pack("<HHIHH", 259, 3, 1, value, 0) for value in (1, 60000))
    assert content.count(uncompressed) == 1
    path.write_bytes(content.replace(uncompressed, unknown))
    with refused("a.tif: cannot be decoded (60000 is not a known COMPRESSION)"):
        read_image(path)


def test_unsupported_colors_are_named(tmp_path):
    Image.new("LAB", HW).save(tmp_path / "lab.tif")
    with refused("lab.tif: TIFF of kind CIELAB with 3 channels is not supported; save it as RGB or PNG"):
        read_image(tmp_path / "lab.tif")


def test_only_the_first_page_is_read_as_rgb(tmp_path):
    """GDAL's overviews are pages of other sizes."""
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        for size in (16, 8):
            image = np.full((3, size, size), size * 257, np.uint16)
            file.write(image, photometric="rgb", planarconfig="separate", metadata=None)
    np.testing.assert_array_equal(read_image(tmp_path / "a.tif"), np.full((16, 16, 3), 16))


OVERVIEW = {"subfiletype": 1}
MASK = {"subfiletype": 4, "photometric": "mask"}
UNMARKED = {}


@pytest.mark.parametrize("others", [[OVERVIEW], [MASK], [OVERVIEW, MASK, {**MASK, "subfiletype": 5}], [UNMARKED]])
@pytest.mark.parametrize("pixels", [PixelFormat(), PixelFormat(3, 16), PixelFormat(1, 16), PixelFormat(5, 16)], ids=str)
def test_overviews_and_masks_are_not_channels(tmp_path, others, pixels):
    """GDAL writes them as pages of their own."""
    path = tmp_path / "a.tif"
    image = np.random.default_rng(0).integers(0, 1 << 16, (*HW, pixels.channels), np.uint16)
    options = {"photometric": "rgb" if pixels.channels == 3 else "minisblack", "metadata": None}
    if pixels.channels > 1:
        options["planarconfig"] = "contig"
    with tifffile.TiffWriter(path) as file:
        file.write(np.squeeze(image), **options)
        for other in others:
            page = np.ones(HW, bool) if "photometric" in other else np.squeeze(image[::2, ::2])
            file.write(page, **(options | other))
    expected = image if pixels.bits == 16 else np.rint(image / 257)
    np.testing.assert_array_equal(read_image(path, pixels=pixels), expected)
    assert check_image(path, pixels=pixels).size_hw == HW


def test_each_page_is_a_channel_beside_overviews(tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (5, *HW), np.uint8)
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        for channel in image:
            file.write(channel, photometric="minisblack", metadata=None)
            file.write(channel[::2, ::2], photometric="minisblack", metadata=None, **OVERVIEW)
    read = read_image(tmp_path / "a.tif", pixels=PixelFormat(5))
    np.testing.assert_array_equal(read, np.moveaxis(image, 0, -1))


def test_unmarked_pages_of_several_sizes_are_refused(tmp_path):
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        for size in (16, 16, 8):
            file.write(np.zeros((size, size), np.uint8), photometric="minisblack", metadata=None)
    with refused("a.tif: its 3 pages are not gray images of one size and type; save one page per channel"):
        read_image(tmp_path / "a.tif", pixels=PixelFormat(2))


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
    """The reason used to be "0", "unpack requires a buffer of 4 bytes" or "float64 pixels", or an IndexError was
    raised."""
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


def directory_entry(content: bytes, tag: int) -> int:
    """Returns the byte at which the entry of a field begins."""
    (directory,) = struct.unpack_from("<I", content, 4)
    (num_entries,) = struct.unpack_from("<H", content, directory)
    entries = [directory + 2 + 12 * number for number in range(num_entries)]
    (entry,) = (entry for entry in entries if struct.unpack_from("<H", content, entry) == (tag,))
    return entry


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


@pytest.mark.parametrize("planar", ["contig", "separate"])
@pytest.mark.parametrize("tile", [(16, 16), (32, 48), (80, 16)])
def test_uncompressed_tiles_of_any_size_are_read(tmp_path, planar, tile):
    """OpenCV fails at those whose bytes are not a multiple of 1024."""
    path = tmp_path / "a.tif"
    image = np.random.default_rng(0).integers(0, 255, (*HW, 3), np.uint8)
    stored = image if planar == "contig" else np.moveaxis(image, -1, 0)
    tifffile.imwrite(path, stored, photometric="rgb", planarconfig=planar, tile=tile)
    np.testing.assert_array_equal(read_image(path), image)


@pytest.mark.parametrize(("tag", "needed"), [(322, "1,536"), (323, "4,608")], ids=["TileWidth", "TileLength"])
def test_uncompressed_tiles_of_another_size_than_listed_are_refused(tmp_path, tag, needed):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.zeros((*HW, 3), np.uint8), photometric="rgb", tile=(16, 48))
    content = bytearray(path.read_bytes())
    struct.pack_into("<H", content, directory_entry(content, tag) + 8, 32)
    path.write_bytes(content)
    with refused(f"a.tif: cannot be decoded (its tiles need {needed} bytes, the file lists 2,304)"):
        read_image(path, pixels=PixelFormat(3, 16))


def test_tiles_whose_bytes_are_listed_as_those_of_strips_are_read(tmp_path):
    path = tmp_path / "a.tif"
    image = np.random.default_rng(0).integers(0, 255, (64, 96, 3), np.uint8)
    tifffile.imwrite(path, image, photometric="rgb", tile=(32, 32))
    content = bytearray(path.read_bytes())
    for tag, of_strips in ((324, 273), (325, 279)):  # TileOffsets, TileByteCounts
        struct.pack_into("<H", content, directory_entry(content, tag), of_strips)
    path.write_bytes(content)
    np.testing.assert_array_equal(read_image(path), image)


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


UNKNOWN_TAG = 60000


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


@pytest.mark.parametrize("layout", [{}, {"last_padding": b"\xff" * 2}, {"surplus": [0]}], ids=str)
def test_uncompressed_strips_without_their_number_of_rows_are_read(tmp_path, layout):
    image, content = strips(**layout)
    rename_field(content, 278, UNKNOWN_TAG)  # RowsPerStrip
    assert_reads(tmp_path / "a.tif", content, image)


def test_strips_with_gaps_need_their_number_of_rows(tmp_path):
    """Decoders took the bytes between the strips for pixels."""
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
    """The rows that a damaged length lacks were taken for padding of the last strip."""
    path = tmp_path / "a.tif"
    _, content = strips()
    rename_field(content, 278, UNKNOWN_TAG)  # RowsPerStrip
    struct.pack_into("<I", content, directory_entry(content, 257) + 8, HW[0] - num_missing)  # ImageLength
    path.write_bytes(content)
    with refused("a.tif: cannot be decoded (its first strip needs ... bytes, the file lists 1,344)"):
        read_image(path)


def test_one_strip_of_all_planes_is_refused(tmp_path):
    """OpenCV read the first plane, and two of other pixels."""
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
    """The tags differ by a bit, and the image was turned."""
    path = tmp_path / "a.tif"
    _, content = strips()
    rename_field(content, 278, 274)  # RowsPerStrip, Orientation
    path.write_bytes(content)
    with refused("a.tif: cannot be decoded (its first strip needs 6,720 bytes, the file lists 1,344)"):
        read_image(path)


@pytest.mark.parametrize("predictor", [0, 2, 3])
def test_a_predictor_of_uncompressed_pixels_is_ignored(tmp_path, predictor):
    """libtiff does not read the field; 0 and 3 were refused, and tifffile took pixels for differences with 2."""
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
    """tifffile filled the planes without one with zeros."""
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


BILEVEL_COMPRESSIONS = {"tiff_ccitt": 2, "group3": 3, "group4": 4, "tiff_raw_16": 32771}


@pytest.mark.parametrize("compression", BILEVEL_COMPRESSIONS)
def test_compressions_of_bilevel_images_have_one_bit_and_no_predictor(tmp_path, compression):
    """libtiff ignores the field Predictor of such files; the one of tiff_raw_16 was refused."""
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
    """The message used to call the field BitsPerSample, which has a value for each channel, damaged."""
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
    """The scan used to leave out the image as damaged."""
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


@pytest.mark.parametrize("hw", [(1, 1), (1, 9), (9, 1)])
def test_images_of_one_row_or_column_are_read(tmp_path, hw):
    image = np.arange(hw[0] * hw[1] * 3, dtype=np.uint16).reshape(*hw, 3)
    tifffile.imwrite(tmp_path / "a.tif", image, photometric="rgb", metadata=None)
    np.testing.assert_array_equal(read_image(tmp_path / "a.tif", pixels=PixelFormat(3, 16)), image)
