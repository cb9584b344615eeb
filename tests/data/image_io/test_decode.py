"""Images of every format are decoded upright, as 8-bit RGB; damaged ones are detected, mostly without decoding."""

from __future__ import annotations

import io
import re
import struct
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image, ImageOps

from data.image_io import file_kinds, verify
from data.image_io.decode import orient, read_image
from data.image_io.file_kinds import IMAGE_SUFFIXES, unread_image
from data.image_io.header import exif_orientation
from data.image_io.reduce import read_reduced, read_source
from data.image_io.verify import check_image
from tests.helpers.exif import exif_block, jpeg_with_exif
from tests.helpers.messages import refused
from utils.errors import UserError
from utils.pixels import PixelFormat


def gradient(height=24, width=40):
    """An image that is smooth, so that JPEG preserves it, and different on every side, so that rotations are
    visible."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 255 // width, y * 255 // height, (x + y) * 255 // (width + height)], 2).astype(np.uint8)


def png_chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width, height, bits, color_type, rows, *extra):
    header = struct.pack(">IIBBBBB", width, height, bits, color_type, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row for row in rows))
    chunks = [png_chunk(b"IHDR", header), *extra, png_chunk(b"IDAT", body), png_chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def with_orientation(kind, image, orientation):
    if kind in "<>":
        return jpeg_with_exif(image, orientation, kind)
    if kind == "png":
        return png(40, 24, 8, 2, [row.tobytes() for row in image], png_chunk(b"eXIf", exif_block(orientation)))
    exif = Image.Exif()
    file = io.BytesIO()
    exif[0x0112] = orientation
    format_name, options = {
        "webp": ("webp", {"lossless": True}),
        "tiff": ("tiff", {}),
        "bigtiff": ("tiff", {"big_tiff": True}),
    }[kind]
    Image.fromarray(image).save(file, format_name, exif=exif, **options)
    return file.getvalue()


def webp_with_exif(image_rgb, block):
    """A lossless WebP whose EXIF chunk is ``block``; Pillow would remove its prefix."""
    file = io.BytesIO()
    placeholder = bytes([1]) * len(block)
    Image.fromarray(image_rgb).save(file, "webp", exif=placeholder, lossless=True)
    assert file.getvalue().count(placeholder) == 1
    return file.getvalue().replace(placeholder, block)


@pytest.mark.parametrize("kind", ["<", ">", "png", "webp", "tiff", "bigtiff"])
def test_exif_orientation_is_applied_and_reported(tmp_path, kind):
    """Covers JPEGs of both byte orders, PNG, WebP, TIFF and BigTIFF."""
    path = tmp_path / "a"
    image = gradient()
    turned = image.transpose(1, 0, 2)
    upright = [image, image[:, ::-1], image[::-1, ::-1], image[::-1]]
    upright += [turned, turned[:, ::-1], turned[::-1, ::-1], turned[::-1]]
    for orientation, expected in enumerate(upright, 1):
        path.write_bytes(with_orientation(kind, image, orientation))
        found = read_image(path)
        np.testing.assert_allclose(found.astype(int), expected.astype(int), atol=6 if kind in "<>" else 0)
        assert check_image(path).size_hw == found.shape[:2]
        assert check_image(path).orientation == orientation
        assert found.flags.c_contiguous


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_prefixes_of_an_exif_block_are_skipped(tmp_path, kind):
    """Pillow skips them, too: some programs write the prefix of JPEG's block twice, or to a WebP."""
    path = tmp_path / "a"
    if kind == "jpeg":
        path.write_bytes(jpeg_with_exif(gradient(), 6, prefix=2 * b"Exif\0\0"))
    else:
        path.write_bytes(webp_with_exif(gradient(), b"Exif\0\0" + exif_block(6)))
    with Image.open(path) as opened:
        expected = np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))
    image = read_image(path)
    np.testing.assert_allclose(image.astype(int), expected.astype(int), atol=6 if kind == "jpeg" else 0)
    assert check_image(path).size_hw == image.shape[:2] == (40, 24)
    assert check_image(path).orientation == 6


@pytest.mark.parametrize("offset", [0, 30, 2**63, 2**64 - 1])
def test_a_directory_outside_of_a_block_has_no_orientation(offset):
    assert exif_orientation(b"II+\0" + struct.pack("<HHQ", 8, 0, offset) + bytes(16)) == 1


def test_images_of_any_number_of_channels_are_turned():
    image = np.arange(2 * 3 * 40, dtype=np.uint8).reshape(2, 3, 40)
    np.testing.assert_array_equal(orient(image, 5), image.transpose(1, 0, 2))
    np.testing.assert_array_equal(orient(image, 6), image.transpose(1, 0, 2)[:, ::-1])


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_a_reduced_jpeg_is_the_image_divided_by_a_power_of_two(tmp_path, orientation):
    path = tmp_path / "image.jpg"
    path.write_bytes(jpeg_with_exif(gradient(248, 400), orientation))
    whole = read_image(path)
    height, width = whole.shape[:2]
    for share, wanted in ((1, (height // 2 + 1, 10)), (2, (height // 2, width // 2)), (2, (100, 100)), (8, (1, 1))):
        image, full = read_reduced(path, wanted)
        assert full == (height, width)
        assert image.shape == (-(-height // share), -(-width // share), 3)
        expected = cv2.resize(whole, image.shape[1::-1], interpolation=cv2.INTER_AREA)
        assert np.abs(image.astype(int) - expected).mean() < 1.5
    assert np.array_equal(read_reduced(path, (height, width))[0], whole)
    path.write_bytes(jpeg_with_exif(gradient(250, 401), orientation))
    assert max(read_reduced(path, (1, 1))[0].shape) == 201  # 1/4 and 1/8 would pad by more than half a pixel


@pytest.mark.parametrize(("suffix", "side"), [(".png", 800), (".png", 801), (".jpg", 800)])
def test_training_sees_no_aliasing_in_large_images_of_any_format(tmp_path, suffix, side):
    """Black and white pixels become gray; a bilinear reduction, as validation and published evaluations have it, keeps
    much of their contrast."""
    noise = np.random.default_rng(0).choice(np.array([0, 255], np.uint8), (side, side, 1)).repeat(3, 2)
    path = tmp_path / f"noise{suffix}"
    path.write_bytes(cv2.imencode(suffix, noise)[1].tobytes())
    sizes = (str(path), np.array([side, side]), np.array([100, 100]))
    reduced = read_source(*sizes)
    assert reduced.shape == (100, 100, 3)
    assert reduced.std() < 25
    assert read_source(*sizes, antialias=False).std() > 50


def test_other_formats_are_never_reduced_and_paths_may_be_non_ascii(tmp_path):
    path = tmp_path / "Größe 図像 ñ.png"
    expected = gradient(64, 64)
    path.write_bytes(cv2.imencode(".png", expected[..., ::-1])[1].tobytes())
    image, full = read_reduced(path, (8, 8))
    assert full == (64, 64)
    np.testing.assert_array_equal(image, expected)
    np.testing.assert_array_equal(read_image(path), expected)


def test_grayscale_images_become_three_equal_channels(tmp_path):
    gray = gradient()[..., 0]
    for suffix in ("png", "bmp", "pgm", "tif"):
        path = tmp_path / f"g.{suffix}"
        cv2.imwrite(str(path), gray)
        np.testing.assert_array_equal(read_image(path), np.repeat(gray[..., None], 3, 2))
    cv2.imwrite(str(tmp_path / "g.jpg"), gray)
    image = read_image(tmp_path / "g.jpg")
    assert image.shape == (24, 40, 3)
    assert (image == image[..., :1]).all()


def test_sixteen_bits_keep_black_and_white(tmp_path):
    gray = np.array([[0, 65535], [257 * 100, 257 * 7]], np.uint16)
    color = np.stack([gray, gray.T, gray[::-1]], 2)
    for suffix in ("png", "tif"):
        cv2.imwrite(str(tmp_path / f"g.{suffix}"), gray)
        cv2.imwrite(str(tmp_path / f"c.{suffix}"), color[..., ::-1])
        np.testing.assert_array_equal(read_image(tmp_path / f"g.{suffix}")[..., 0], [[0, 255], [100, 7]])
        np.testing.assert_array_equal(read_image(tmp_path / f"c.{suffix}"), color // 257)


def test_alpha_is_dropped(tmp_path):
    image = gradient()
    alpha = np.zeros((24, 40, 1), np.uint8)
    cv2.imwrite(str(tmp_path / "a.png"), np.concatenate([image[..., ::-1], alpha], 2))
    np.testing.assert_array_equal(read_image(tmp_path / "a.png"), image)
    gray_alpha = png(2, 1, 8, 4, [bytes([10, 0, 200, 255])])
    (tmp_path / "ga.png").write_bytes(gray_alpha)
    np.testing.assert_array_equal(read_image(tmp_path / "ga.png")[..., 0], [[10, 200]])


@pytest.mark.parametrize("is_big", [False, True])
@pytest.mark.parametrize("compression", ["raw", "tiff_lzw"])
def test_alpha_of_a_tiff_is_dropped(tmp_path, compression, is_big):
    """libtiff multiplies colors by alpha, which Pillow marks as unassociated."""
    image = gradient()
    alpha = (np.arange(24 * 40) % 256).astype(np.uint8).reshape(24, 40, 1)
    rgba = Image.fromarray(np.concatenate([image, alpha], 2))
    rgba.save(tmp_path / "a.tif", compression=compression, big_tiff=is_big)
    np.testing.assert_array_equal(read_image(tmp_path / "a.tif"), image)


def test_a_tiff_of_too_many_channels_is_refused_in_one_line(tmp_path, capfd):
    tifffile = pytest.importorskip("tifffile")
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((8, 8, 5), np.uint8), photometric="minisblack", planarconfig="contig")
    with refused(
        "a.tif: 5 channels; expected 1 (gray), 3 (color), 4 (color and alpha), or the number of 'channels' in the YAML"
    ):
        read_image(tmp_path / "a.tif")
    assert capfd.readouterr().err == ""


def test_palette_and_one_bit_images_become_rgb(tmp_path):
    palette = png_chunk(b"PLTE", bytes([255, 0, 0, 0, 255, 0, 1, 2, 3]))
    (tmp_path / "p.png").write_bytes(png(3, 1, 8, 3, [bytes([2, 0, 1])], palette))
    np.testing.assert_array_equal(read_image(tmp_path / "p.png"), [[[1, 2, 3], [255, 0, 0], [0, 255, 0]]])
    (tmp_path / "b.png").write_bytes(png(8, 1, 1, 0, [bytes([0b10100000])]))
    np.testing.assert_array_equal(read_image(tmp_path / "b.png")[0, :4, 0], [255, 0, 255, 0])


def bmp(image_bgrx, masks, header_bytes=40):
    """A BMP of 32 bits per pixel; an OS/2 header has 12 bytes, 24 bits per pixel and no masks."""
    height, width = image_bgrx.shape[:2]
    if header_bytes == 12:
        header = struct.pack("<IHHHH", 12, width, height, 1, 24)
        pixels = b"".join(row.tobytes() + bytes(-row.nbytes % 4) for row in image_bgrx[::-1, :, :3])
    else:
        header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 32, 3, 0, 0, 0, 0, 0) + struct.pack("<III", *masks)
        pixels = image_bgrx[::-1].tobytes()
    begin = 14 + len(header)
    return b"BM" + struct.pack("<IHHI", begin + len(pixels), 0, 0, begin) + header + pixels


def test_bmp_and_pnm_that_opencv_would_misread_are_refused(tmp_path):
    rgb = gradient()
    bgrx = np.concatenate([rgb[..., ::-1], np.zeros_like(rgb[..., :1])], 2)
    usual = bmp(bgrx, (0xFF0000, 0xFF00, 0xFF))
    size = b"40 24\n"
    for data in (usual, b"P6\n# 1 2 3\n" + size + b"255\n" + rgb.tobytes()):
        (tmp_path / "a").write_bytes(data)
        np.testing.assert_array_equal(read_image(tmp_path / "a"), rgb)
    for data, kind in (
        (bmp(bgrx, (0xFF, 0xFF00, 0xFF0000)), "a BMP with its own bit masks"),
        (bmp(bgrx, (), header_bytes=12), "a BMP of OS/2"),
        (b"P5\n" + size + b"100\n" + rgb[..., 0].tobytes(), "a PNM with values up to 100"),
        (b"P5 # 12 bits\n" + size + b"4095\n" + rgb[..., :2].tobytes(), "a PNM with values up to 4095"),
        (b"P7\nWIDTH 40\nHEIGHT 24\nDEPTH 3\nMAXVAL 255\nTUPLTYPE RGB\nENDHDR\n" + rgb.tobytes(), "a PAM"),
    ):
        (tmp_path / "b").write_bytes(data)
        for refuse in (read_image, check_image):
            with refused(f"b: {kind} is not supported; convert it to PNG"):
                refuse(tmp_path / "b")


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_text_pnm_needs_no_newline_at_its_end(tmp_path, end):
    rgb = gradient()
    for kind, values in ((b"P2", rgb[..., 1]), (b"P3", rgb)):
        numbers = b" ".join(b"%d" % value for value in values.ravel().tolist())
        (tmp_path / "a.ppm").write_bytes(kind + b" 40 24 255\n" + numbers + end)
        np.testing.assert_array_equal(read_image(tmp_path / "a.ppm"), np.broadcast_to(values.T, (3, 40, 24)).T)
        assert check_image(tmp_path / "a.ppm").size_hw == (24, 40)
        (tmp_path / "a.ppm").write_bytes(kind + b" 40 24 255\n" + numbers[:-4] + end)
        with refused("a.ppm: cannot be decoded (damaged, or not an image)"):
            read_image(tmp_path / "a.ppm")


def test_a_pnm_of_the_bits_in_the_yaml_is_read(tmp_path):
    values = np.arange(24 * 40, dtype=np.uint16).reshape(24, 40) * 4
    (tmp_path / "a.pgm").write_bytes(b"P5 40 24 4095\n" + values.astype(">u2").tobytes())
    image = read_image(tmp_path / "a.pgm", pixels=PixelFormat(1, 12))
    np.testing.assert_allclose(image[..., 0] / 65535, values / 4095, atol=0.5 / 65535)


@pytest.mark.parametrize("suffix", sorted(IMAGE_SUFFIXES))
def test_files_of_every_suffix_are_read(tmp_path, suffix):
    """Images are recognized by their content, whatever their suffix."""
    formats = dict.fromkeys((".jif", ".jfif", ".pjpeg", ".pjp", ".mpo"), ".jpg") | {".j2k": ".jp2"}
    formats |= dict.fromkeys((".pbm", ".pgm"), ".ppm")
    data = cv2.imencode(formats.get(suffix, suffix), gradient(64, 64)[..., ::-1])[1].tobytes()
    if suffix == ".j2k":  # the bare codestream
        data = data[data.index(b"\xff\x4f\xff\x51") :]
    path = tmp_path / f"image{suffix.upper()}"
    path.write_bytes(data)
    assert read_image(path).shape == (64, 64, 3)
    assert check_image(path).size_hw == (64, 64)
    assert not unread_image(path)
    bare = path.rename(tmp_path / "image")
    is_text = suffix in (".j2k", ".pbm", ".pgm", ".ppm", ".pnm")  # or too few fixed bytes
    assert ("rename it to end in" in unread_image(bare)) != is_text


@pytest.mark.parametrize(
    ("name", "start", "told"),
    [
        ("a.HEIC", b"", r"^\.heic files are not supported; convert them to JPEG or PNG$"),
        ("a.jpg_large", b"\xff\xd8\xff\xe0", r"a \.jpg image, but has another suffix; rename it to end in \.jpg$"),
        ("a", b"\0\0\0\x18ftypheic", r"contains a \.heic image, but has another suffix; convert it to JPEG or PNG$"),
        ("a", b"GIF89a", r"contains a \.gif image"),
        ("a", b"BM the letters", "^$"),
        ("a.txt", b"\xff\xd8\xff\xe0", "^$"),
        ("a.log", b"", "^$"),
    ],
)
def test_images_that_are_not_read_are_told_from_other_files(tmp_path, name, start, told):
    (tmp_path / name).write_bytes(start + bytes(20))
    assert re.search(told, unread_image(tmp_path / name))


def test_other_files_are_not_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(file_kinds, "open_regular", lambda path: pytest.fail(f"{path} is opened"))
    for name in ("a.jpg", "a.JSON", "a.txt", "a.npy", "a.heic"):
        unread_image(tmp_path / name)


@pytest.mark.parametrize("mode", ["LA", "CMYK"])
def test_a_kind_of_jpeg_2000_that_opencv_does_not_read_is_not_called_damaged(tmp_path, mode):
    path = tmp_path / "a.jp2"
    Image.new(mode, (40, 30)).save(path)
    reason = "damaged, or of a kind of JPEG 2000 that is not supported, such as with alpha; save it as PNG"
    with refused(f"a.jp2: cannot be decoded ({reason})"):
        read_image(path)


UNDECODABLE = "cannot be decoded (damaged, or not an image)"


@pytest.mark.parametrize(
    ("suffix", "messages"),
    [  # messages for files cut to 0, 1, 30, 60, 90 and 99 percent of their bytes
        (
            ".jpg",
            ["damaged image (the file is empty)", "damaged image (truncated in the header)"]
            + 4 * ["damaged image (truncated: no end marker)"],
        ),
        (".png", ["damaged image (the file is empty)", *5 * ["damaged image (truncated in chunk 'IDAT')"]]),
        (".webp", ["damaged image (the file is empty)", *5 * [UNDECODABLE]]),
        (".bmp", ["damaged image (the file is empty)", *5 * [UNDECODABLE]]),
    ],
    ids=[".jpg", ".png", ".webp", ".bmp"],
)
def test_every_truncated_file_is_detected(tmp_path, suffix, messages):
    data = cv2.imencode(suffix, np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))[1].tobytes()
    path = tmp_path / f"t{suffix}"
    for share, message in zip((0, 0.01, 0.3, 0.6, 0.9, 0.99), messages, strict=True):
        path.write_bytes(data[: int(len(data) * share)])
        for read in (read_image, check_image):
            with refused(f"t{suffix}: {message}"):
                read(path)


def test_a_truncated_jpeg_is_detected_and_trailing_bytes_are_accepted(tmp_path):
    """An embedded thumbnail has its own end marker, which does not hide truncation."""
    path = tmp_path / "a.jpg"
    plain = jpeg_with_exif(gradient(), 1)
    thumbnail = cv2.imencode(".jpg", np.zeros((8, 8, 3), np.uint8))[1].tobytes()
    shown = plain[:2] + b"\xff\xe2" + struct.pack(">H", len(thumbnail) + 2) + thumbnail + plain[2:]
    for data in (plain + bytes(100), shown):
        path.write_bytes(data)
        assert check_image(path).size_hw == (24, 40)
    for data in (plain[:-2], shown[:-40]):
        path.write_bytes(data)
        with refused("a.jpg: damaged image (truncated: no end marker)"):
            check_image(path)


@pytest.mark.parametrize("is_frame", [False, True])
def test_an_animated_png_shows_its_default_image(tmp_path, is_frame):
    """The default image need not be a frame. Labeling tools show it."""
    rng = np.random.default_rng(0)
    frames = [Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8)) for _ in range(3)]
    path = tmp_path / "a.png"
    frames[0].save(path, save_all=True, default_image=not is_frame, append_images=frames[1:])
    np.testing.assert_array_equal(read_image(path), np.asarray(frames[0]))


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (-1, "d.png: damaged image (wrong checksum of chunk 'IEND')"),
        (-40, "d.png: cannot be decoded (damaged, or not an image)"),
    ],
)
def test_a_damaged_png_is_detected(tmp_path, at, message):
    """Decoders at most warn about wrong checksums."""
    data = bytearray(cv2.imencode(".png", gradient())[1].tobytes())
    data[at] ^= 0xFF
    (tmp_path / "d.png").write_bytes(data)
    with refused(message):
        check_image(tmp_path / "d.png")


def test_a_file_that_is_not_an_image_is_refused(tmp_path):
    (tmp_path / "x.jpg").write_bytes(b"<html>not found</html>")
    (tmp_path / "f.tif").write_bytes(cv2.imencode(".tiff", np.zeros((4, 4), np.float32))[1].tobytes())
    for name, message in (
        ("x.jpg", "x.jpg: cannot be decoded (damaged, or not an image)"),
        ("absent.jpg", "absent.jpg: no such image"),
        (".", "...: cannot be read (is a folder, not a file)"),
    ):
        with refused(message):
            read_image(tmp_path / name)
    with refused("f.tif: float32 pixels are not supported; convert the image to 8 or 16 bits"):
        read_image(tmp_path / "f.tif")


@pytest.mark.parametrize(("start", "kind"), [(b"\0\0\0\x18ftypheic", ".heic"), (b"\0\0\0\x18ftypmif1", ".heic")])
def test_the_content_of_another_format_is_named(tmp_path, start, kind):
    """Phones write such files, and apps rename them."""
    (tmp_path / "photo.jpg").write_bytes(start + bytes(range(256)) * 4)
    for read in (read_image, check_image):
        text = rf"photo.jpg: cannot be decoded \(it contains a \{kind} image, which is not supported; convert it"
        with pytest.raises(UserError, match=text):
            read(tmp_path / "photo.jpg")


def test_random_headers_raise_only_the_expected_error(tmp_path):
    rng = np.random.default_rng(1)
    whole = [jpeg_with_exif(gradient(), 6), png(40, 24, 8, 2, [r.tobytes() for r in gradient()])]
    path = tmp_path / "r.jpg"
    for trial in range(120):
        data = bytearray(whole[trial % 2])
        for at in rng.integers(0, min(len(data), 200), 3):
            data[at] = rng.integers(256)
        path.write_bytes(data)
        try:
            size = check_image(path).size_hw
        except UserError:
            continue
        assert read_image(path).shape[:2] == size


def test_a_tiff_that_its_decoder_reports_as_damaged_is_refused(tmp_path):
    """OpenCV returns the part of the image that it could read, and logs an error."""
    picture = np.random.default_rng(0).integers(0, 256, (80, 60, 3), dtype=np.uint8)
    data = cv2.imencode(".tif", picture)[1].tobytes()
    num_refused = 0
    for at in range(200, len(data) // 2, 997):
        (tmp_path / "x.tif").write_bytes(data[:at] + b"\xff" * 40 + data[at + 40 :])
        try:
            check_image(tmp_path / "x.tif")
        except UserError:
            num_refused += 1
        else:
            found = read_image(tmp_path / "x.tif", lambda *_: pytest.fail("passes the scan, and is damaged"))
            assert found.shape == picture.shape
    assert num_refused


def picture(seed: int = 0, height: int = 37, width: int = 52) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def by_opencv(image: np.ndarray, *options: int) -> bytes:
    return cv2.imencode(".jpg", image, options)[1].tobytes()


def by_pillow(image: np.ndarray, mode: str = "RGB", **options) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


USUAL = {
    "opencv": by_opencv(picture()),
    "opencv, best": by_opencv(picture(), cv2.IMWRITE_JPEG_QUALITY, 100),
    "opencv, gray": by_opencv(picture()[..., 0]),
    "restarts": by_opencv(picture(), cv2.IMWRITE_JPEG_RST_INTERVAL, 2),
    "optimized": by_pillow(picture(), optimize=True),
    "4:4:4": by_pillow(picture(), subsampling=0),
    "4:2:2": by_pillow(picture(), subsampling=1),
    "long header": by_pillow(picture(), comment=b"x" * 40_000),
    "turned": by_pillow(picture(), exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"),
}


def test_jpegs_of_common_encoders_are_not_decoded_but_others_are(tmp_path, monkeypatch) -> None:
    path = tmp_path / "a.jpg"
    decoded = []
    monkeypatch.setattr(verify, "imdecode", lambda *_: decoded.append(path))
    for data in USUAL.values():
        path.write_bytes(data)
        assert check_image(path).size_hw == read_image(path).shape[:2]
        assert decoded == []
    for data in (by_opencv(picture(), cv2.IMWRITE_JPEG_PROGRESSIVE, 1), by_pillow(picture(), "CMYK")):
        path.write_bytes(data)
        assert check_image(path).size_hw == (37, 52)
    assert len(decoded) == 2


def test_accepted_files_can_be_decoded(tmp_path) -> None:
    """Random bytes of the header are changed, one or a few at a time."""
    rng = np.random.default_rng(1)
    path = tmp_path / "a.jpg"
    accepted = 0
    for data in USUAL.values():
        header = data.index(b"\xff\xda") + 14
        for _ in range(120):
            changed = bytearray(data)
            for at in rng.integers(2, min(header, 1000), rng.integers(1, 4)):
                changed[at] = rng.integers(0, 256)
            path.write_bytes(changed)
            try:
                size = check_image(path).size_hw
            except UserError:
                continue
            accepted += 1
            if size[0] * size[1] <= 1 << 20:
                assert read_image(path).shape[:2] == size
    assert 0.15 < accepted / (120 * len(USUAL)) < 0.95
