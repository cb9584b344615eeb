"""Every kind of TIFF is read as it was written, or refused in one line."""

from __future__ import annotations

import itertools
import struct
import sys
from typing import NamedTuple

import cv2
import numpy as np
import pytest
from PIL import Image

from data.image_io.decode import read_image
from data.image_io.reduce import read_reduced
from data.image_io.verify import check_image
from tests.data.image_io.tiff_files import FORMATS, HW, directory_entry
from tests.helpers.messages import refused
from utils.errors import UserError
from utils.pixels import PixelFormat

tifffile = pytest.importorskip("tifffile")

GRAY = ("minisblack", "miniswhite")
# Tags of pages beside the image.
OVERVIEW = {"subfiletype": 1}
MASK = {"subfiletype": 4, "photometric": "mask"}
UNMARKED = {}


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


@pytest.mark.parametrize("planar", ["contig", "separate"])
@pytest.mark.parametrize("tile", [(16, 16), (32, 48), (80, 16)])
def test_uncompressed_tiles_of_any_size_are_read(tmp_path, planar, tile):
    """OpenCV fails on those whose bytes are not a multiple of 1024."""
    path = tmp_path / "a.tif"
    image = np.random.default_rng(0).integers(0, 255, (*HW, 3), np.uint8)
    stored = image if planar == "contig" else np.moveaxis(image, -1, 0)
    tifffile.imwrite(path, stored, photometric="rgb", planarconfig=planar, tile=tile)
    np.testing.assert_array_equal(read_image(path), image)


def test_tiles_whose_bytes_are_listed_as_those_of_strips_are_read(tmp_path):
    path = tmp_path / "a.tif"
    image = np.random.default_rng(0).integers(0, 255, (64, 96, 3), np.uint8)
    tifffile.imwrite(path, image, photometric="rgb", tile=(32, 32))
    content = bytearray(path.read_bytes())
    for tag, of_strips in ((324, 273), (325, 279)):  # TileOffsets, TileByteCounts
        struct.pack_into("<H", content, directory_entry(content, tag), of_strips)
    path.write_bytes(content)
    np.testing.assert_array_equal(read_image(path), image)


@pytest.mark.parametrize("hw", [(1, 1), (1, 9), (9, 1)])
def test_images_of_one_row_or_column_are_read(tmp_path, hw):
    image = np.arange(hw[0] * hw[1] * 3, dtype=np.uint16).reshape(*hw, 3)
    tifffile.imwrite(tmp_path / "a.tif", image, photometric="rgb", metadata=None)
    np.testing.assert_array_equal(read_image(tmp_path / "a.tif", pixels=PixelFormat(3, 16)), image)
