"""Copies the tensors of a checkpoint that fit into a detector, and reports all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from models.detector import Detector
from models.heads.base import ONE_TO_ONE
from models.weights.load import class_count, model_of, names_for
from models.weights.read import COUNTERS, StoredWeights, read_weights
from utils.errors import UserError
from utils.logger import get_logger
from utils.strings import counted, listed

NOT_IN_FILE = "not in the file"


@dataclass(frozen=True, slots=True)
class TransferReport:
    """Which tensors of a model were copied from a file."""

    source: str
    taken: tuple[str, ...]  # whole tensors
    new_rows: dict[str, tuple[int, ...]]  # tensors that were copied partly, with the rows left as initialized
    skipped: dict[str, str]  # the model's other tensors, with the reason
    unused: tuple[str, ...]  # tensors of the file that the model does not have
    classes: tuple[str, ...]  # names of the classes whose rows were copied

    def lines(self) -> list[str]:
        """For the log: what was copied, what was not and why, and what is unused."""
        total = len(self.taken) + len(self.new_rows) + len(self.skipped)
        first = f"{self.source}: {len(self.taken)} of {total} tensors loaded"
        if self.new_rows:
            common = f"rows of {counted(len(self.classes), 'common class')}: {listed(self.classes)}"
            first += f", {len(self.new_rows)} loaded partly ({common if self.classes else 'no class in common'})"
        skipped: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():  # all shapes that differ share a line, with the first as the example
            skipped.setdefault("shape" if reason.startswith("shape ") else reason, []).append(name)
        lines = [f"left as initialized: {_layers(names)}: {self.skipped[names[0]]}" for names in skipped.values()]
        if self.unused:
            lines.append(f"in the file, but not in the model: {_layers(self.unused)}")
        return [first, *lines]


def _layers(names: Sequence[str]) -> str:
    """Layers with their numbers of tensors: ``model.22.cv3 (6 tensors)``."""
    counts = Counter(".".join(name.split(".")[:3]) for name in names)
    return listed([f"{layer} ({counted(count, 'tensor')})" for layer, count in counts.items()])


def _contains(target: Tensor, source: Tensor) -> bool:
    """Whether ``target`` is larger than ``source``, and nowhere smaller."""
    sizes = list(zip(target.shape, source.shape))
    return target.dim() == source.dim() and all(a >= b for a, b in sizes) and any(a > b for a, b in sizes)


def _shapes(target: Tensor, source: Tensor) -> str:
    return f"shape {list(target.shape)} here, {list(source.shape)} there"


class _ClassRows(NamedTuple):
    """How an output layer of the file is copied: row ``there[i]`` to row ``here[i]`` of the model's."""

    here: list[int]
    there: list[int]
    size: int  # rows of the file's layer

    def misfit(self, target: Tensor, source: Tensor | None) -> str:
        """Why the rows cannot be copied; empty if they can."""
        if source is None:
            return NOT_IN_FILE
        if source.shape != (self.size, *target.shape[1:]):
            return _shapes(target, source)
        return "" if self.here else "the file and the model have no class name in common"


@torch.no_grad()
def transfer_weights(model: Detector, source: str | Path | StoredWeights, *, grow: bool = False) -> TransferReport:
    """Copies what fits from a checkpoint into a detector: tensors of equal name and shape, and of the output layers the
    rows of the classes that both have, by name (ignoring case and outer spaces). The kernel that reads RGB images is
    adapted to a model of other channels.

    If the file has no class names, output layers are copied if they have as many classes. A head with two branches gets
    the tensors of a single branch twice. Raises UserError for an unreadable file, and if nothing fits.

    ``grow``: a larger tensor of the model gets the file's as its first part, and what belongs to it does not see the
    rest, so that a model with more classes, the file's first, scores those as the file's model does.
    """
    stored = source if isinstance(source, StoredWeights) else read_weights(source)
    own = model.state_dict()
    tensors = _for_both_branches(own, stored.tensors)
    pairs, rows = _class_rows(model, names_for(class_count(model, stored.shapes), stored.names, stored.path))
    taken, skipped, new_rows = [], {}, {}
    for name, target in own.items():
        found = tensors.get(name)
        if found is not None and name.startswith("model.0.") and found.ndim == 4 and found.shape[1] == 3:
            found = for_channels(found, target.shape[1]) if target.shape[1] == model.channels else found
        layer, _, _ = name.rpartition(".")
        if layer in rows:  # both or neither: a bias without its weight is harmful
            leaves = (f"{layer}.weight", f"{layer}.bias")
            reason = next(filter(None, (rows[layer].misfit(own[n], tensors.get(n)) for n in leaves)), "")
        elif found is None:
            reason = NOT_IN_FILE
        else:
            reason = "" if found.shape == target.shape else _shapes(target, found)
        if grow and found is not None and _contains(target, found):
            target[: len(found)] = 0
            target[tuple(map(slice, found.shape))] = found
            new_rows[name] = tuple(range(len(found), len(target)))
        elif reason:
            skipped[name] = reason
        elif layer in rows and not rows[layer].here == rows[layer].there == list(range(len(target))):
            target[rows[layer].here] = found[rows[layer].there].to(target.device)
            new_rows[name] = tuple(sorted({*range(len(target))}.difference(rows[layer].here)))
        else:
            target.copy_(found)
            taken.append(name)
    if all(name.endswith(COUNTERS) for name in [*taken, *new_rows]):
        raise UserError(f"{stored.path}: no tensor fits this model; is it of another family or size?")
    unused = tuple(name for name in stored.tensors if name not in own)
    is_used = any(f"{layer}.weight" not in skipped for layer in rows)
    classes = tuple(model.names[here] for here, _ in pairs if is_used)
    return TransferReport(str(stored.path), tuple(taken), new_rows, skipped, unused, classes)


def fill_model(model: Detector, stored: StoredWeights, *, grow: bool) -> dict[str, tuple[int, ...]]:
    """Copies what fits into the ``model`` of a new run and logs what does not. Returns the filled parameters: by name,
    the rows that are still random. ``grow``: see `transfer_weights`."""
    report, log = transfer_weights(model, stored, grow=grow), get_logger()
    if model.channels != 3 and model_of(stored).get("channels", 3) == 3:
        channels = counted(model.channels, "channel")
        log.info("%s: its RGB kernels are adapted to images of %s", stored.path, channels)
    for line in report.lines():
        log.info("%s", line)
    names = (name for name, _ in model.named_parameters() if name not in report.skipped)
    return {name: report.new_rows.get(name, ()) for name in names}


def for_channels(kernel: Tensor, channels: int) -> Tensor:
    """A kernel (O, 3, h, w) of RGB images as one (O, channels, h, w) with the same sum, so that an image whose channels
    are all equal gives what its RGB image gives (as `adapt_input_conv` of timm). The first three channels keep theirs,
    the others get the mean, and with less than three channels all do."""
    if channels == 3:
        return kernel
    adapted = kernel.mean(1, keepdim=True).repeat(1, channels, 1, 1)
    if channels > 3:
        adapted[:, :3] = kernel
    return adapted * (3 / channels)


def _for_both_branches(own: Iterable[str], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The file's tensors, with those of a single branch also under the names of the model's second branch."""
    single = {name: name.replace(f".{ONE_TO_ONE}", ".") for name in own if f".{ONE_TO_ONE}" in name}
    if any(name in tensors for name in single):
        return tensors
    return tensors | {second: tensors[first] for second, first in single.items() if first in tensors}


def _class_rows(model: Detector, names: Sequence[str] | None) -> tuple[list[tuple[int, int]], dict[str, _ClassRows]]:
    """The common classes, by number in the model and in the file, and their rows by name of the output layer, with the
    rows that belong to no class. Both are empty if the file names no classes."""
    if names is None:
        return [], {}
    there = {name.strip().lower(): i for i, name in reversed(list(enumerate(names)))}
    keys = enumerate(name.strip().lower() for name in model.names)
    pairs = [(i, there[key]) for i, key in keys if key in there]
    head, rows = f"model.{len(model.model) - 1}.", {}
    for name, (groups, before) in model.head.class_rows().items():
        copied = [(i, i) for i in range(before)] + [(before + i, before + j) for i, j in pairs]
        size, size_there = before + model.num_classes, before + len(names)  # of a group
        rows[head + name] = _ClassRows(
            here=[group * size + row for group in range(groups) for row, _ in copied],
            there=[group * size_there + row for group in range(groups) for _, row in copied],
            size=groups * size_there,
        )
    return pairs, rows
