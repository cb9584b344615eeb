"""The interface of a file format of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.formats.graphs import ModelGraphs
from engine.formats.metadata import ExportMetadata


@dataclass(frozen=True)
class Session:
    """An exported file, opened by its runtime. It computes in float32 unless the file says otherwise, on as many
    threads as torch, so that results can be compared."""

    run: Callable[[Tensor], Tensor]  # float32 (B, C, H, W) to the output, on the same device; thread-safe
    metadata: dict[str, Any]  # text by key; plain data if it was read from a YAML
    input_shape: tuple[int | None, ...] | None  # B, C, H, W; None: any; torch's formats leave it to the metadata


class ModelFormat(ABC):
    """A file format of models: how a graph is built, written and read. `EXPORT_FORMATS` holds its suffix, packages and
    flags."""

    @abstractmethod
    def build(self, graphs: ModelGraphs) -> Any:
        """Returns the graph that `write` takes. The graph contains no path of this machine."""

    @abstractmethod
    def write(self, graph: Any, path: Path, metadata: ExportMetadata) -> None:
        """Writes a file or folder, replacing it atomically. Raises OSError if it cannot be written."""

    @abstractmethod
    def open(self, path: Path, device: torch.device) -> Session:
        """Opens a file or folder with the format's runtime, on the CPU if the runtime does not support ``device``.
        Raises UserError if it is damaged or a package is not installed."""

    def requirements(self, graph: Any) -> str:
        """Returns the requirements for reading the file, for the log; "" if there are none."""
        return ""
