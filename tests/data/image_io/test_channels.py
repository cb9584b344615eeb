"""Images of any number of channels and of up to 16 bits are read as they were written; others get one line."""

import os
import struct
import sys

import cv2
import numpy as np
import pytest

from data.image_io.decode import read_image
from data.image_io.reduce import read_reduced
from data.image_io.verify import check_image
from tests.helpers.messages import refused
from utils.pixels import PixelFormat, as_rgb8

RNG = np.random.default_rng(0)


def samples(channels, bits=8, height=20, width=30):
    return RNG.integers(0, 1 << bits, (height, width, channels)).astype(np.uint8 if bits == 8 else np.uint16)


def write_png(path, image):
    path.write_bytes(cv2.imencode(".png", image)[1].tobytes())


def write_pages(path, image):
    assert cv2.imwritemulti(str(path), [np.ascontiguousarray(image[..., c]) for c in range(image.shape[2])])


def chunky_tiff(image, photometric):
    """A TIFF of one page with all samples of a pixel together, which OpenCV cannot write for these channels."""
    height, width, channels = image.shape
    bits = image.itemsize * 8
    extra = channels - (3 if photometric == 2 else 1)
    tags = [(256, [width]), (257, [height]), (258, [bits] * channels), (259, [1]), (262, [photometric]), (273, [0])]
    tags += [(277, [channels]), (278, [height]), (279, [image.nbytes]), (284, [1])]
    tags += [(338, [0] * extra)] * (extra > 0)
    at = 8 + 2 + 12 * len(tags) + 4
    start = at + sum(2 * len(values) for _, values in tags if len(values) > 2)
    entries = b""
    rest = b""
    for tag, values in tags:
        values = [start] if tag == 273 else values
        packed = struct.pack(f"<{len(values)}H", *values)
        if len(values) > 2:
            offset = struct.pack("<I", at + len(rest))
            rest += packed
            packed = offset
        entries += struct.pack("<HHI", tag, 3, len(values)) + packed.ljust(4, b"\0")
    directory = struct.pack("<H", len(tags)) + entries + bytes(4)
    return b"II*\0" + struct.pack("<I", 8) + directory + rest + image.astype(image.dtype.newbyteorder("<")).tobytes()


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("channels", [1, 2, 4, 5, 12])
def test_arrays_and_pages_are_read_as_they_were_written(tmp_path, channels, bits):
    image = samples(channels, bits)
    pixels = PixelFormat(channels, bits)
    arrays = {
        "c.npy": image,
        "fortran.npy": np.asfortranarray(image),
        "big.npy": image.astype(image.dtype.newbyteorder(">")),
    }
    for name, array in arrays.items():
        np.save(tmp_path / name, array)
    write_pages(tmp_path / "pages.tif", image)
    for name in (*arrays, "pages.tif"):
        read = read_image(tmp_path / name, pixels=pixels)
        assert read.dtype == image.dtype
        assert read.flags.c_contiguous
        np.testing.assert_array_equal(read, image, err_msg=name)
        sizes = {check_image(tmp_path / name, pixels=pixels, decode=decode).size_hw for decode in (False, True)}
        assert sizes == {(20, 30)}
        assert read_reduced(tmp_path / name, (10, 10), pixels=pixels)[1] == (20, 30)


@pytest.mark.parametrize("bits", [8, 16])
def test_ordinary_images_become_gray_and_keep_alpha_and_16_bits(tmp_path, bits):
    bgra = samples(4, bits)
    write_png(tmp_path / "color.png", bgra[..., :3])
    write_png(tmp_path / "alpha.png", bgra)
    write_png(tmp_path / "gray.png", bgra[..., 0])
    gray = cv2.cvtColor(bgra[..., :3], cv2.COLOR_BGR2GRAY)[..., None]
    for name, channels, expected in [
        ("color.png", 1, gray),
        ("alpha.png", 1, gray),
        ("gray.png", 1, bgra[..., :1]),
        ("alpha.png", 4, bgra[..., [2, 1, 0, 3]]),
        ("color.png", 3, bgra[..., [2, 1, 0]]),
        ("gray.png", 3, np.repeat(bgra[..., :1], 3, 2)),
    ]:
        np.testing.assert_array_equal(read_image(tmp_path / name, pixels=PixelFormat(channels, bits)), expected)


def test_a_jpeg_as_gray_is_its_luma_also_reduced_and_turned(tmp_path):
    image = cv2.resize(samples(3), (96, 64), interpolation=cv2.INTER_CUBIC)
    (tmp_path / "a.jpg").write_bytes(cv2.imencode(".jpg", image)[1].tobytes())
    decoded = cv2.imread(str(tmp_path / "a.jpg"), cv2.IMREAD_GRAYSCALE)
    gray = PixelFormat(1)
    np.testing.assert_array_equal(read_image(tmp_path / "a.jpg", pixels=gray)[..., 0], decoded)
    assert read_reduced(tmp_path / "a.jpg", (16, 16), pixels=gray)[0].shape == (16, 24, 1)
    wide = read_image(tmp_path / "a.jpg", pixels=PixelFormat(1, 16))
    np.testing.assert_array_equal(wide[..., 0], decoded.astype(int) * 257)
    assert check_image(tmp_path / "a.jpg", pixels=gray).size_hw == (64, 96)


def test_values_of_12_bits_are_stretched_without_loss(tmp_path):
    image = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    write_png(tmp_path / "a.png", image)
    read = read_image(tmp_path / "a.png", pixels=PixelFormat(1, 12))[..., 0]
    np.testing.assert_allclose(read / 65535, image / 4095, atol=0.5 / 65535)
    assert np.unique(read).size == 4096
    write_png(tmp_path / "a.png", image + np.uint16(9))
    with refused("a.png: has the value 4104, above 12 bits; correct 'bits' in the YAML"):
        read_image(tmp_path / "a.png", pixels=PixelFormat(1, 12))


@pytest.mark.parametrize(("channels", "photometric"), [(4, 1), (2, 1), (6, 1), (6, 2)])
def test_channels_that_opencv_would_drop_are_read_by_tifffile_or_refused(tmp_path, channels, photometric, monkeypatch):
    image = samples(channels, 16)
    path = tmp_path / "a.tif"
    path.write_bytes(chunky_tiff(image, photometric))
    np.testing.assert_array_equal(read_image(path, pixels=PixelFormat(channels, 16)), image)
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with refused(
        "a.tif: reading this kind of TIFF: the package tifffile is not installed; pip install tifffile, or save it "
        "as PNG or .npy"
    ):
        read_image(path, pixels=PixelFormat(channels, 16))


def test_a_tiff_of_red_green_blue_and_alpha_is_read_in_this_order(tmp_path):
    image = samples(4)
    (tmp_path / "a.tif").write_bytes(chunky_tiff(image, 2))
    np.testing.assert_array_equal(read_image(tmp_path / "a.tif", pixels=PixelFormat(4)), image)


@pytest.mark.parametrize(
    ("name", "write", "pixels", "message"),
    [
        (
            "a.png",
            lambda p: write_png(p, samples(3)),
            PixelFormat(4),
            "a.png: 3 channels, but the data set or model has 4; correct 'channels' in the YAML, or the image",
        ),
        (
            "a.npy",
            lambda p: np.save(p, samples(5)),
            PixelFormat(4),
            "a.npy: 5 channels, but the data set or model has 4; correct 'channels' in the YAML, or the image",
        ),
        (
            "a.npy",
            lambda p: np.save(p, samples(5)),
            PixelFormat(1),
            "a.npy: 5 channels, but the data set or model has 1; correct 'channels' in the YAML, or the image",
        ),
        (
            "a.npy",
            lambda p: np.save(p, samples(5).transpose(2, 0, 1)),
            PixelFormat(5),
            "a.npy: has shape (5, 20, 30), channels first; save it as (H, W, channels)",
        ),
        (
            "a.npy",
            lambda p: np.save(p, samples(5) / 255),
            PixelFormat(5),
            "a.npy: float64 pixels are not supported; convert the image to 8 or 16 bits",
        ),
        (
            "a.npy",
            lambda p: np.save(p, np.array([{}], object)),
            PixelFormat(5),
            "a.npy: damaged .npy file, or not an array of numbers",
        ),
        (
            "a.npy",
            lambda p: np.save(p, np.full((2, 2, 5), None)),
            PixelFormat(5),
            "a.npy: damaged .npy file, or not an array of numbers",
        ),
        (
            "a.npy",
            lambda p: p.write_bytes(b"\x93NUMPY\x01\0\x10\0nonsense nonsense"),
            PixelFormat(5),
            "a.npy: damaged .npy file, or not an array of numbers",
        ),
        (
            "a.npy",
            lambda p: p.write_bytes(b"\xff\xd8 no array"),
            PixelFormat(5),
            "a.npy: damaged image (no marker at byte 2)",
        ),
        (
            "a.npy",
            lambda p: np.save(p, samples(5)) or os.truncate(p, p.stat().st_size - 1),
            PixelFormat(5),
            "a.npy: damaged .npy file, or not an array of numbers",
        ),
        (
            "a.tif",
            lambda p: write_pages(p, samples(3)),
            PixelFormat(5),
            "a.tif: 3 channels, but the data set or model has 5; correct 'channels' in the YAML, or the image",
        ),
        (
            "a.jpg",
            lambda p: cv2.imwrite(str(p), samples(3)),
            PixelFormat(4),
            "a.jpg: a JPEG has 3 channels at most, but the data set or model has 4",
        ),
    ],
)
def test_other_images_are_refused_in_one_line_by_the_scan_and_by_the_reader(tmp_path, name, write, pixels, message):
    write(tmp_path / name)
    for refuse in (check_image, read_image):
        with refused(message):
            refuse(tmp_path / name, pixels=pixels)


def test_people_see_gray_or_the_first_three_channels_in_8_bits():
    image = samples(5, 16)
    np.testing.assert_array_equal(as_rgb8(image), np.rint(image[..., :3] / 257))
    np.testing.assert_array_equal(as_rgb8(image[..., :2]), np.repeat(np.rint(image[..., :1] / 257), 3, 2))
    rgb = samples(3)
    assert as_rgb8(rgb) is rgb


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (100, "a.tif: cannot be decoded (corrupted IFD structure)"),
        (500, "a.tif: 4 channels, but the data set or model has 5; correct 'channels' in the YAML, or the image"),
        (2000, "a.tif: 3 channels, but the data set or model has 5; correct 'channels' in the YAML, or the image"),
    ],
)
def test_damaged_pages_are_one_line_and_print_nothing(tmp_path, keep, capfd, message):
    path = tmp_path / "a.tif"
    write_pages(path, samples(5, 16))
    whole = path.read_bytes()
    capfd.readouterr()
    path.write_bytes(whole[:-keep])
    with refused(message):
        check_image(path, pixels=PixelFormat(5, 16))
    assert capfd.readouterr().err == ""
