"""Settings of detection in tiles, as ``--tile`` and related flags give them. `models.postprocess.tiling` uses them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from utils.boxes import TILE_OVERLAP
from utils.config.checks import check_image_size
from utils.config.plain_values import checked_value
from utils.config.settings import DetectConfig, ValConfig
from utils.errors import UserError
from utils.schema import Bounds, hints_of


@dataclass(frozen=True)
class Tiles:
    """Settings for cutting large images into tiles. Raises UserError for values that no model takes."""

    size: Annotated[int, Bounds(1)]  # side, pixels
    overlap: Annotated[float, Bounds(0, 0.9)] = TILE_OVERLAP  # overlap of neighbors, as a fraction of a tile
    full_image: bool = True  # whether the detector also runs on the whole image, scaled down
    scaled: bool = False  # whether tiles are scaled to the detector's image size, as in training

    def __post_init__(self) -> None:
        for name, hint in hints_of(Tiles).items():
            # The dataclass is frozen.
            object.__setattr__(self, name, checked_value(f"Tiles: {name}", getattr(self, name), hint))

    @classmethod
    def as_trained(cls, size: int, overlap: float = TILE_OVERLAP) -> Tiles:
        """Returns the tiles of a model that was trained on tiles of this size."""
        return cls(size, overlap, full_image=False, scaled=True)

    @classmethod
    def from_config(cls, config: DetectConfig | ValConfig, trained_size: int) -> Tiles | None:
        """Returns the tiles that the flags choose; without ``--tile``, the tiles on which the model was trained.

        ``trained_size``: side of those tiles in pixels, or 0 for training on whole images. Returns None for detection
        in whole images. Raises UserError for flags that have no effect.
        """
        overlap = TILE_OVERLAP if config.overlap is None else config.overlap
        if config.tile:
            return cls(config.tile, overlap, config.tile_full_image)
        if config.tile is None and trained_size and config.tile_full_image:
            return cls.as_trained(trained_size, overlap)
        if config.overlap is not None or not config.tile_full_image:
            flag = "--no-tile-full-image" if config.overlap is None else "--overlap"
            raise UserError(f"{flag}: has no effect without --tile; add --tile, or leave {flag} out")
        return None

    def check(self, stride: int, input_hw: tuple[int, int] | None) -> None:
        """Raises UserError unless a model of this ``stride`` accepts the tiles. ``input_hw``: the only canvas size that
        it accepts; None: any."""
        if not self.scaled:
            check_image_size(self.size, stride, flag="--tile")
        if input_hw is None:
            return
        height, width = input_hw
        takes_only = f"the exported model takes only {height}x{width} pixels (height x width)"
        if self.scaled and height != width:
            raise UserError(
                f"{takes_only}, but it was trained on square tiles; detect in whole images with --tile 0 (in Python: "
                "tiles=False)"
            )
        if not self.scaled and (height, width) != (self.size, self.size):
            raise UserError(f"--tile {self.size}: {takes_only}")
