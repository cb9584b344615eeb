"""TIFFs are read as tifffile wrote them, by OpenCV or by tifffile, or refused in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from data.images.decode import read_image, read_reduced
from data.images.verify import check_image
from tests.data.images.pictures import noise
from tests.helpers.messages import refused
from utils.pixels import PixelFormat

tifffile = pytest.importorskip("tifffile")

LAYOUTS = {
    "strips": {},
    "tiles": {"tile": (32, 32)},
    "deflate": {"compression": "deflate"},
    "planes": {"planarconfig": "separate"},
}


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(
    ("meaning", "channels"), [("minisblack", 1), ("miniswhite", 1), ("minisblack", 2), ("rgb", 3), ("rgb", 4)]
)
def test_usual_kinds_are_read_as_8_bit_rgb(
    tmp_path: Path, meaning: str, channels: int, bits: int, layout: str, orientation: int
):
    """Alpha, the second or fourth channel, is dropped."""
    if layout == "planes" and channels == 1:
        pytest.skip("there is no such file")
    samples = noise(channels, bits)
    options: dict = LAYOUTS[layout] | {"photometric": meaning, "metadata": None}
    options["extratags"] = [(274, 3, 1, orientation, True)]
    if channels in (2, 4):
        options["extrasamples"] = (2,)
    if channels > 1 and layout != "planes":
        options["planarconfig"] = "contig"
    stored = np.moveaxis(samples, -1, 0) if layout == "planes" else samples.squeeze() if channels == 1 else samples
    tifffile.imwrite(tmp_path / "a.tif", stored, **options)
    fractions = samples / ((1 << bits) - 1)
    fractions = 1 - fractions if meaning == "miniswhite" else fractions
    rgb = fractions[..., :3] if channels > 2 else np.repeat(fractions[..., :1], 3, 2)
    expected = np.rint((np.rot90(rgb, -1) if orientation == 6 else rgb) * 255)
    np.testing.assert_array_equal(read_image(tmp_path / "a.tif"), expected)
    assert check_image(tmp_path / "a.tif")[::2] == (expected.shape[:2], orientation)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("channels", [1, 2, 4, 5, 12])
def test_channels_are_read_from_one_page_from_planes_and_from_pages(tmp_path: Path, channels: int, bits: int):
    samples = noise(channels, bits)
    pixels = PixelFormat(channels, bits)
    planes = np.moveaxis(samples, -1, 0)
    together = {"photometric": "minisblack", "metadata": None}
    if channels > 1:
        tifffile.imwrite(tmp_path / "chunky.tif", samples, planarconfig="contig", **together)
        tifffile.imwrite(tmp_path / "planes.tif", planes, planarconfig="separate", compression="zstd", **together)
    with tifffile.TiffWriter(tmp_path / "pages.tif") as file:
        for plane in planes:
            file.write(plane, **together)
        file.write(planes[0, ::2, ::2], subfiletype=1, **together)  # an overview
        file.write(planes[0] > 0, subfiletype=4, photometric="mask", metadata=None)
    for path in sorted(tmp_path.iterdir()):
        np.testing.assert_array_equal(read_image(path, pixels), samples, path.name)
        assert check_image(path, pixels=pixels).size_hw == (20, 30)
        assert read_reduced(path, (10, 10), pixels)[1] == (20, 30)


@pytest.mark.parametrize(
    ("samples", "options", "pixels"),
    [
        (noise(5), {"photometric": "minisblack", "planarconfig": "contig"}, PixelFormat()),
        (noise(3), {"photometric": "cielab"}, PixelFormat()),
        (noise(3), {"photometric": "rgb"}, PixelFormat(5)),
        (noise(3).astype(np.float32), {"photometric": "rgb"}, PixelFormat()),
    ],
)
def test_other_tiffs_are_refused(tmp_path: Path, samples: np.ndarray, options: dict, pixels: PixelFormat):
    tifffile.imwrite(tmp_path / "a.tif", samples, **options)
    for refuse in (check_image, read_image):
        with refused("a.tif: ..."):
            refuse(tmp_path / "a.tif", pixels=pixels)


def test_without_tifffile_usual_tiffs_are_read_and_others_name_the_package(tmp_path: Path, monkeypatch):
    tifffile.imwrite(tmp_path / "usual.tif", noise(), photometric="rgb")
    planes = np.moveaxis(noise(3, 16), -1, 0)
    tifffile.imwrite(tmp_path / "planes.tif", planes, photometric="rgb", planarconfig="separate")
    monkeypatch.setitem(sys.modules, "tifffile", None)
    np.testing.assert_array_equal(read_image(tmp_path / "usual.tif"), noise())
    with refused("planes.tif: ...pip install tifffile..."):
        read_image(tmp_path / "planes.tif")
