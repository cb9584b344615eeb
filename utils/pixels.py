"""The format of pixels: number of channels and bits per channel. Conversions between formats, and the padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from utils.schema import Bounds, build
from utils.strings import counted

if TYPE_CHECKING:
    import torch

MAX_CHANNELS = 128  # OpenCV 5 has no images with more
GRAY = 114  # uint8 value of the padding around images
_UINT16_PER_UINT8 = 257  # 255 becomes 65535


@dataclass(frozen=True, slots=True)
class PixelFormat:
    """The pixels of a data set's images, and of those that a model takes.

    Images of 8 bits are uint8. Images of 9 to 16 bits are uint16 of the whole range: values of 12 bits are multiplied
    by 65535 / 4095 when they are read. Images of three channels are RGB, those of one are gray.
    """

    channels: Annotated[int, Bounds(1, MAX_CHANNELS)] = 3
    bits: Annotated[int, Bounds(8, 16)] = 8

    @classmethod
    def checked(cls, channels: Any, bits: Any, location: str) -> PixelFormat:
        """Creates a format from the values of a file. Raises UserError, beginning with ``location``, for others."""
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
        """Bytes of one pixel."""
        return self.channels * self.dtype.itemsize

    def content(self) -> dict[str, int]:
        """Returns the lines for a data set's YAML; empty for the default."""
        return {} if self == RGB8 else {"channels": self.channels, "bits": self.bits}

    def __str__(self) -> str:
        return f"{counted(self.channels, 'channel')} of {self.bits} bits"


RGB8 = PixelFormat()


def as_16_bits(image: np.ndarray, bits: int) -> np.ndarray:
    """Converts uint8, or uint16 of ``bits`` bits, to uint16 of the whole range."""
    if image.dtype == np.uint8:
        return image.astype(np.uint16) * np.uint16(_UINT16_PER_UINT8)
    if bits == 16:
        return image
    max_value = (1 << bits) - 1
    return ((image.astype(np.uint32) * 65535 + max_value // 2) // max_value).astype(np.uint16)


def as_rgb8(images: np.ndarray) -> np.ndarray:
    """Converts images (..., C), uint8 or uint16, to what people see: uint8 (..., 3) RGB. One or two channels are shown
    as gray; of more than three, the first three are shown. uint8 of three channels is returned itself."""
    if images.shape[-1] != 3:
        images = images[..., :3] if images.shape[-1] > 3 else np.repeat(images[..., :1], 3, -1)
    if images.dtype == np.uint16:
        images = ((images + np.uint32(_UINT16_PER_UINT8 // 2)) // _UINT16_PER_UINT8).astype(np.uint8)
    return images


def padding_value(dtype: np.dtype) -> int:
    """Returns the gray of the padding around images of ``dtype``, uint8 or uint16."""
    return GRAY if dtype == np.uint8 else GRAY * 257
