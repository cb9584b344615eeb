"""Images of every kind are decoded upright to the pixels that Pillow and NumPy see; others are refused in one line."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image, ImageOps

from data.images.decode import read_image, read_reduced, read_source
from data.images.kinds import IMAGE_SUFFIXES
from data.images.verify import check_image
from tests.data.images.pictures import encoded, gradient, noise
from tests.helpers.exif import exif_block, jpeg_with_exif
from tests.helpers.messages import refused
from utils.pixels import PixelFormat


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpeg", "jpeg, big-endian", "png", "webp", "tiff"])
def test_exif_orientation_is_applied_and_reported(tmp_path: Path, kind: str, orientation: int):
    if kind == "tiff":
        pytest.importorskip("tifffile")
    if kind.startswith("jpeg"):
        data = jpeg_with_exif(gradient(), orientation, ">" if "big" in kind else "<")
    else:
        options = {"lossless": True} if kind == "webp" else {}
        data = encoded(gradient(), kind, exif=exif_block(orientation), **options)
    path = tmp_path / "a"
    path.write_bytes(data)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    image = read_image(path)
    np.testing.assert_allclose(image.astype(int), expected.astype(int), atol=2 if kind.startswith("jpeg") else 0)
    assert image.flags.c_contiguous
    assert check_image(path) == (image.shape[:2], 0, orientation)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "LA", "P", "1"])
@pytest.mark.parametrize("kind", ["png", "bmp", "webp", "ppm", "tiff"])
def test_lossless_kinds_have_the_colors_that_pillow_sees(tmp_path: Path, kind: str, mode: str):
    """Alpha is dropped, not blended; gray is repeated; palettes are expanded."""
    if (kind in ("bmp", "ppm") and "A" in mode) or (kind == "ppm" and mode == "P"):
        pytest.skip("there is no such file")
    if kind == "tiff" and mode in ("RGBA", "LA", "1"):
        pytest.importorskip("tifffile")
    picture = noise(4)[..., :3] if "A" not in mode else noise(4)
    picture = Image.fromarray(picture).convert(mode)
    path = tmp_path / f"Größe 図像.{kind}"
    picture.save(path, kind, **({"lossless": True, "exact": True} if kind == "webp" else {}))
    expected = np.asarray(Image.open(path).convert("RGBA"))[..., :3]
    np.testing.assert_array_equal(read_image(path), expected)
    assert check_image(path).size_hw == (20, 30)


@pytest.mark.parametrize("suffix", sorted(IMAGE_SUFFIXES))
def test_files_of_every_suffix_are_read(tmp_path: Path, suffix: str):
    """Images are recognized by their content."""
    formats = dict.fromkeys((".jif", ".jfif", ".pjpeg", ".pjp", ".mpo"), ".jpg") | {".j2k": ".jp2"}
    formats |= dict.fromkeys((".pbm", ".pgm"), ".ppm")
    path = tmp_path / f"image{suffix.upper()}"
    path.write_bytes(cv2.imencode(formats.get(suffix, suffix), gradient(64, 64)[..., ::-1])[1].tobytes())
    assert np.abs(read_image(path).astype(int) - gradient(64, 64)).mean() < 3


@pytest.mark.parametrize("bits", [8, 16])
def test_pngs_become_gray_and_keep_alpha_and_16_bits(tmp_path: Path, bits: int):
    bgra = noise(4, bits)
    gray = cv2.cvtColor(bgra[..., :3], cv2.COLOR_BGR2GRAY)[..., None]
    for image, channels, expected in (
        (bgra[..., :3], 1, gray),
        (bgra, 1, gray),
        (bgra[..., :1], 1, bgra[..., :1]),
        (bgra, 4, bgra[..., [2, 1, 0, 3]]),
        (bgra[..., :3], 3, bgra[..., [2, 1, 0]]),
        (bgra[..., :1], 3, np.repeat(bgra[..., :1], 3, 2)),
    ):
        (tmp_path / "a.png").write_bytes(cv2.imencode(".png", image)[1].tobytes())
        np.testing.assert_array_equal(read_image(tmp_path / "a.png", PixelFormat(channels, bits)), expected)
    narrow = read_image(tmp_path / "a.png")
    np.testing.assert_array_equal(narrow, np.rint(expected / (257 if bits == 16 else 1)))
    assert check_image(tmp_path / "a.png").max_value == (image.max() if bits == 16 else 0)


def test_a_jpeg_is_gray_or_color_whatever_it_holds(tmp_path: Path):
    for mode in ("RGB", "L", "CMYK"):
        (tmp_path / "a.jpg").write_bytes(encoded(gradient(), "jpeg", mode, quality=95))
        expected = np.asarray(Image.open(tmp_path / "a.jpg").convert("RGB")).astype(int)
        assert np.abs(read_image(tmp_path / "a.jpg") - expected).max() <= 3
        luma = cv2.imread(str(tmp_path / "a.jpg"), cv2.IMREAD_GRAYSCALE)
        np.testing.assert_array_equal(read_image(tmp_path / "a.jpg", PixelFormat(1))[..., 0], luma)
        wide = read_image(tmp_path / "a.jpg", PixelFormat(1, 16))
        np.testing.assert_array_equal(wide[..., 0], luma.astype(int) * 257)


def test_values_of_12_bits_are_stretched_without_loss(tmp_path: Path):
    image = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    cv2.imwrite(str(tmp_path / "a.png"), image)
    read = read_image(tmp_path / "a.png", PixelFormat(1, 12))[..., 0]
    np.testing.assert_allclose(read / 65535, image / 4095, atol=0.5 / 65535)
    cv2.imwrite(str(tmp_path / "a.png"), image + np.uint16(9))
    with refused("a.png: has the value 4104, above 12 bits..."):
        read_image(tmp_path / "a.png", PixelFormat(1, 12))


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("channels", [1, 2, 5, 12])
def test_arrays_are_read_as_they_were_written(tmp_path: Path, channels: int, bits: int):
    image = noise(channels, bits)
    pixels = PixelFormat(channels, bits)
    for array in (image, np.asfortranarray(image), image.astype(image.dtype.newbyteorder(">"))):
        np.save(tmp_path / "a.npy", array)
        read = read_image(tmp_path / "a.npy", pixels)
        assert read.dtype == image.dtype
        assert read.flags.c_contiguous
        np.testing.assert_array_equal(read, image)
        assert check_image(tmp_path / "a.npy", pixels=pixels).size_hw == (20, 30)


def write_bytes(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def save(array: np.ndarray) -> Callable[[Path], object]:
    return lambda path: np.save(path, array)


def save_cut(path: Path) -> None:
    np.save(path, noise(5))
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("name", "write", "pixels"),
    [
        ("a.png", lambda path: cv2.imwrite(str(path), noise(3)), PixelFormat(4)),
        ("a.npy", save(noise(5)), PixelFormat(4)),
        ("channels_first.npy", save(noise(5).transpose(2, 0, 1)), PixelFormat(5)),
        ("float.npy", save(noise(5) / 255), PixelFormat(5)),
        ("float.tif", write_bytes(cv2.imencode(".tiff", np.zeros((4, 4), np.float32))[1].tobytes()), PixelFormat()),
        ("pickle.npy", save(np.full((2, 2, 5), None)), PixelFormat(5)),
        ("cut.npy", save_cut, PixelFormat(5)),
        ("page.jpg", write_bytes(b"<html>not found</html>"), PixelFormat()),
        ("photo.jpg", write_bytes(b"\0\0\0\x18ftypheic" + bytes(range(256))), PixelFormat()),
        ("absent.jpg", lambda path: None, PixelFormat()),
        ("pipe.jpg", os.mkfifo, PixelFormat()),
    ],
)
def test_other_images_are_refused_by_the_scan_and_by_the_reader(
    tmp_path: Path, name: str, write: Callable[[Path], object], pixels: PixelFormat
):
    write(tmp_path / name)
    for refuse in (check_image, read_image):
        with refused(f"{name}: ..."):
            refuse(tmp_path / name, pixels=pixels)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".bmp", ".tif", ".jp2", ".ppm"])
def test_every_truncated_file_is_refused(tmp_path: Path, suffix: str):
    data = cv2.imencode(suffix, noise(height=64, width=64))[1].tobytes()
    for fraction in (0, 0.01, 0.3, 0.6, 0.9, 0.99):
        (tmp_path / f"t{suffix}").write_bytes(data[: int(len(data) * fraction)])
        for refuse in (check_image, read_image):
            with refused(f"t{suffix}: ..."):
                refuse(tmp_path / f"t{suffix}")


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_a_reduced_jpeg_is_the_image_divided_by_a_power_of_two(tmp_path: Path, orientation: int):
    path = tmp_path / "image.jpg"
    path.write_bytes(jpeg_with_exif(gradient(248, 400), orientation))
    whole = read_image(path)
    height, width = whole.shape[:2]
    for share, min_hw in ((1, (height // 2 + 1, 10)), (2, (height // 2, width // 2)), (2, (100, 100)), (8, (1, 1))):
        image, full_hw = read_reduced(path, min_hw)
        assert full_hw == (height, width)
        assert image.shape == (-(-height // share), -(-width // share), 3)
        expected = cv2.resize(whole, image.shape[1::-1], interpolation=cv2.INTER_AREA)
        assert np.abs(image.astype(int) - expected).mean() < 1.5
    assert read_reduced(path, (100, 100), PixelFormat(1))[0].shape[2] == 1
    path.write_bytes(jpeg_with_exif(gradient(250, 401), orientation))
    assert max(read_reduced(path, (1, 1))[0].shape) == 201  # 1/4 and 1/8 would pad by more than half a pixel


@pytest.mark.parametrize(("suffix", "side"), [(".png", 800), (".png", 801), (".jpg", 800)])
def test_training_sees_no_aliasing_in_large_images_of_any_format(tmp_path: Path, suffix: str, side: int):
    """Black and white pixels become gray; a bilinear reduction, as validation and published evaluations have it, keeps
    much of their contrast."""
    picture = np.random.default_rng(0).choice(np.array([0, 255], np.uint8), (side, side, 1)).repeat(3, 2)
    path = tmp_path / f"noise{suffix}"
    cv2.imwrite(str(path), picture)
    sizes = (str(path), np.array([side, side]), np.array([100, 100]))
    reduced = read_source(*sizes)
    assert reduced.shape == (100, 100, 3)
    assert reduced.std() < 25
    assert read_source(*sizes, antialias=False).std() > 50
    with refused("noise...: is ...x... pixels but was ..."):
        read_source(str(path), np.array([side, side + 1]), np.array([100, 100]))
