"""How large images are cut into tiles, as ``--tile`` and its companions ask. `models.postprocess.tiling` does it."""

from __future__ import annotations

from dataclasses import dataclass

from utils.boxes import TILE_OVERLAP
from utils.config.parser import check_image_size
from utils.config.settings import DetectConfig, ValConfig
from utils.errors import UserError


@dataclass(frozen=True)
class Tiles:
    """How large images are cut into tiles."""

    size: int  # side, pixels
    overlap: float = TILE_OVERLAP  # of neighbors, fraction of a tile
    full_image: bool = True  # the detector also sees the whole image, scaled down
    scaled: bool = False  # the detector sees tiles scaled to its image size, as it was trained; else at their own

    @classmethod
    def of(cls, config: DetectConfig | ValConfig, trained: int) -> Tiles | None:
        """As the flags ask, or without ``--tile`` as the model was trained: on tiles of the size ``trained``; 0: on
        whole images. Raises UserError for flags that have no effect."""
        overlap = TILE_OVERLAP if config.overlap is None else config.overlap
        if config.tile:
            return cls(config.tile, overlap, config.tile_full_image)
        if config.tile is None and trained and config.tile_full_image:
            return cls(trained, overlap, full_image=False, scaled=True)
        if config.overlap is not None or not config.tile_full_image:
            flag = "--no-tile-full-image" if config.overlap is None else "--overlap"
            raise UserError(f"{flag}: has no effect without --tile; give --tile, or leave it out")
        return None

    def check(self, stride: int, input_hw: tuple[int, int] | None) -> None:
        """Raises UserError unless a model of this ``stride``, which takes canvases of ``input_hw`` only (None: any),
        takes the tiles."""
        if not self.scaled:
            check_image_size(self.size, stride, flag="--tile")
        size = input_hw[0] if self.scaled and input_hw else self.size
        if input_hw not in (None, (size, size)):
            takes = f"{input_hw[0]}x{input_hw[1]}"
            raise UserError(f"--tile {self.size}: the exported model takes {takes} pixels (height x width) only")
