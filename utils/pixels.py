"""Pixel formats (number of channels, bits per channel), conversions between them, and the padding value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from utils.schema import Bounds, build
from utils.strings import counted

if TYPE_CHECKING:
    import torch

MAX_CHANNELS = 128  # OpenCV 5's maximum
GRAY = 114  # uint8 value of the padding around images
_UINT16_PER_UINT8 = 257  # 255 becomes 65535


@dataclass(frozen=True, slots=True)
class PixelFormat:
    """The pixel format of a data set's images, and of a model's input.

    8-bit images are uint8. Images of 9 to 16 bits are uint16 over the full range: 12-bit values are multiplied by
    65535 / 4095 when they are read. Three-channel images are RGB, single-channel images are gray.
    """

    channels: Annotated[int, Bounds(1, MAX_CHANNELS)] = 3
    bits: Annotated[int, Bounds(8, 16)] = 8

    @classmethod
    def checked(cls, channels: Any, bits: Any, location: str) -> PixelFormat:
        """Creates a format from values in a file. Raises UserError, beginning with ``location``, if they are
        invalid."""
        return build(cls, {"channels": channels, "bits": bits}, location)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint8 if self.bits == 8 else np.uint16)

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        return torch.uint8 if self.bits == 8 else torch.uint16

    @property
    def nbytes(self) -> int:
        """Bytes per pixel."""
        return self.channels * self.dtype.itemsize

    def content(self) -> dict[str, int]:
        """Returns the entries for a data set's YAML; empty for the default format."""
        return {} if self == RGB8 else {"channels": self.channels, "bits": self.bits}

    def __str__(self) -> str:
        return f"{counted(self.channels, 'channel')} of {self.bits} bits"


RGB8 = PixelFormat()


def as_16_bits(image: np.ndarray, bits: int) -> np.ndarray:
    """Converts uint8, or uint16 with ``bits`` significant bits, to uint16 over the full range."""
    if image.dtype == np.uint8:
        return image.astype(np.uint16) * np.uint16(_UINT16_PER_UINT8)
    if bits == 16:
        return image
    max_value = (1 << bits) - 1
    return ((image.astype(np.uint32) * 65535 + max_value // 2) // max_value).astype(np.uint16)


def as_rgb8(images: np.ndarray) -> np.ndarray:
    """Converts images (..., C), uint8 or uint16, to uint8 (..., 3) RGB for display. With one or two channels, the first
    is shown as gray; with more than three, the first three are shown. Three-channel uint8 is returned unchanged."""
    if images.shape[-1] != 3:
        images = images[..., :3] if images.shape[-1] > 3 else np.repeat(images[..., :1], 3, -1)
    if images.dtype == np.uint16:
        images = ((images + np.uint32(_UINT16_PER_UINT8 // 2)) // _UINT16_PER_UINT8).astype(np.uint8)
    return images


def padding_value(dtype: np.dtype) -> int:
    """Returns the gray value of the padding around images of ``dtype``, uint8 or uint16."""
    return GRAY if dtype == np.uint8 else GRAY * _UINT16_PER_UINT8
