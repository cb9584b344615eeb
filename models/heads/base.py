"""What all heads share: a branch of prediction layers, and on request a second one, trained one-to-one.

The pair needs no non-maximum suppression (consistent dual assignments, YOLOv10, Wang et al. 2024). The first branch
learns with many cells a target, which teaches the backbone well; the second with one, so that it finds each object
once. The second sees features without gradient: backbone and neck learn from the first alone, and the detections come
from the second. YOLO26 does the same.

Legend: B images, L levels, C classes, N predictions over all levels.
"""

from __future__ import annotations

import copy
from typing import ClassVar

import torch
from torch import Tensor, nn

SECOND = "one2one_"  # before the names of the second branch's layers, as in public state dicts


class BranchedHead(nn.Module):
    """Base of the heads.

    A subclass names the children that make up a branch in ``branch``, and writes `maps`, `decode_maps`, `set_priors`
    and `output_rows`; none of them needs to know of the pair.
    """

    branch: ClassVar[tuple[str, ...]]
    strides: tuple[int, ...]

    def __init__(self) -> None:
        super().__init__()
        self.prefixes: tuple[str, ...] = ("",)

    def maps(self, features: list[Tensor], *layers: nn.ModuleList) -> list[Tensor]:
        """Features, one a level, through a branch's children in the order of ``branch``: raw maps, one a level."""
        raise NotImplementedError

    def decode_maps(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Raw maps of one branch to boxes float32 (B, N, 4), xyxy canvas pixels, and scores float32 (B, N, C)."""
        raise NotImplementedError

    def set_priors(self, *layers: nn.ModuleList) -> None:
        """Fills the biases of a branch's output layers."""
        raise NotImplementedError

    def output_rows(self) -> dict[str, tuple[int, int]]:
        """Layers of the first branch whose output rows belong to classes: name to (groups, rows before the classes)."""
        raise NotImplementedError

    @property
    def is_end_to_end(self) -> bool:
        """Whether the detections come from a one-to-one branch, so that none of them is to be suppressed."""
        return self.prefixes[-1] == SECOND

    @property
    def is_pair(self) -> bool:
        return len(self.prefixes) == 2

    def add_one_to_one(self) -> None:
        """Gives the head its second branch, equal to the first."""
        for name in self.branch:
            setattr(self, SECOND + name, copy.deepcopy(getattr(self, name)))
        self.prefixes = ("", SECOND)

    def keep_branch(self, *, one_to_one: bool) -> None:
        """Drops a branch of a pair, for inference."""
        dropped, kept = self.prefixes if one_to_one else self.prefixes[::-1]
        for name in self.branch:
            delattr(self, dropped + name)
        self.prefixes = (kept,)

    def _layers(self, prefix: str) -> list[nn.ModuleList]:
        return [getattr(self, prefix + name) for name in self.branch]

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        """Features, one a level, to raw maps, one a level; of a pair the one-to-many branch's, then the other's."""
        raw = []
        for prefix in self.prefixes:
            seen = [x.detach() for x in features] if prefix == SECOND else features
            raw += self.maps(seen, *self._layers(prefix))
        return raw

    def decode(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Raw maps to boxes float32 (B, N, 4), xyxy canvas pixels, and scores float32 (B, N, C) in [0, 1].

        Of a pair, the one-to-one branch's.
        """
        return self.decode_maps(raw[-len(self.strides) :])

    @torch.no_grad()
    def reset_biases(self) -> None:
        """Puts the priors into the biases. A pair starts with equal branches, so both first choose alike."""
        self.set_priors(*self._layers(""))
        if self.is_pair:
            for first, second in zip(self._layers(""), self._layers(SECOND)):
                second.load_state_dict(first.state_dict())

    def class_rows(self) -> dict[str, tuple[int, int]]:
        """Layers whose output rows belong to classes: local name to (groups, rows before the classes of a group)."""
        return {prefix + name: rows for prefix in self.prefixes for name, rows in self.output_rows().items()}
