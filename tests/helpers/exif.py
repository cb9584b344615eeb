"""EXIF blocks, and JPEG files with one."""

from __future__ import annotations

import struct

import cv2


def exif_block(orientation, order="<"):
    """Returns a TIFF header with the tag of orientation. ``order``: of the bytes, "<" or ">"."""
    magic = b"II*\0" if order == "<" else b"MM\0*"
    entry = struct.pack(order + "HHIHH", 0x0112, 3, 1, orientation, 0)
    return magic + struct.pack(order + "IH", 8, 1) + entry + bytes(4)


def jpeg_with_exif(image_rgb, orientation, order="<"):
    """Returns a JPEG of an image, uint8 (H, W, 3), with an orientation."""
    data = cv2.imencode(".jpg", image_rgb[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 100])[1].tobytes()
    block = b"Exif\0\0" + exif_block(orientation, order)
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block + data[2:]
