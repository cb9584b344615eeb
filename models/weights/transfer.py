"""Copies the tensors of a checkpoint that match those of a detector, and reports all others."""

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
    taken: tuple[str, ...]  # tensors copied whole
    new_rows: dict[str, tuple[int, ...]]  # tensors copied in part, with the rows left as initialized
    skipped: dict[str, str]  # the model's other tensors, with the reason
    unused: tuple[str, ...]  # tensors of the file that the model does not have
    classes: tuple[str, ...]  # names of the classes whose rows were copied

    def lines(self) -> list[str]:
        """Describes for the log what was copied, what was not and why, and what is unused."""
        total = len(self.taken) + len(self.new_rows) + len(self.skipped)
        summary = f"{self.source}: {len(self.taken)} of {total} tensors loaded"
        if self.new_rows:
            rows = "no class in common"
            if self.classes:
                rows = f"rows of {counted(len(self.classes), 'common class')}: {listed(self.classes)}"
            summary += f", {len(self.new_rows)} loaded partly ({rows})"
        names_by_reason: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():  # all different shapes share a line, which shows the first
            key = "shape" if reason.startswith("shape ") else reason
            names_by_reason.setdefault(key, []).append(name)
        lines = [summary]
        for names in names_by_reason.values():
            lines.append(f"left as initialized: {_layers(names)}: {self.skipped[names[0]]}")
        if self.unused:
            lines.append(f"in the file, but not in the model: {_layers(self.unused)}")
        return lines


def _layers(names: Sequence[str]) -> str:
    """Lists layers with their numbers of tensors: ``model.22.cv3 (6 tensors)``."""
    counts = Counter(".".join(name.split(".")[:3]) for name in names)
    return listed([f"{layer} ({counted(count, 'tensor')})" for layer, count in counts.items()])


class _ClassRows(NamedTuple):
    """How an output layer is copied: row ``file_rows[i]`` of the file to row ``model_rows[i]`` of the model."""

    model_rows: list[int]
    file_rows: list[int]
    file_size: int  # rows of the file's layer

    def mismatch(self, target: Tensor, tensor: Tensor | None) -> str:
        """Says why the rows cannot be copied; empty if they can."""
        if tensor is None:
            return NOT_IN_FILE
        if tensor.shape != (self.file_size, *target.shape[1:]):
            return _different_shapes(target, tensor)
        return "" if self.model_rows else "the file and the model have no class name in common"

    def copies_all(self, target: Tensor) -> bool:
        """Whether every row is copied to the same row."""
        return self.model_rows == self.file_rows == list(range(len(target)))


@torch.no_grad()
def transfer_weights(model: Detector, source: str | Path | StoredWeights, *, grow: bool = False) -> TransferReport:
    """Copies the tensors of a checkpoint that match those of a detector in name and shape.

    Of output layers it copies the rows of the classes that both have, by name (ignoring case and outer spaces). If the
    file has no class names, output layers are copied if they have as many classes. The kernel that reads RGB images is
    adapted to a model of other channels. A head with two branches gets the tensors of a single branch twice.

    Args:
        model: changed in place.
        source: the checkpoint, or its path.
        grow: whether a larger tensor of the model gets the file's as its first part. Its rows read nothing else, so a
            model with more classes, the file's first, scores those as the file's model does.

    Raises UserError for an unreadable file, and if no tensor matches.
    """
    stored = source if isinstance(source, StoredWeights) else read_weights(source)
    targets = model.state_dict()
    tensors = _for_both_branches(targets, stored.tensors)
    common, class_rows = _class_rows(model, names_for(class_count(model, stored.shapes), stored.names, stored.path))
    taken: list[str] = []
    new_rows: dict[str, tuple[int, ...]] = {}
    skipped: dict[str, str] = {}
    for name, target in targets.items():
        tensor = tensors.get(name)
        if tensor is not None and name.startswith("model.0."):
            tensor = _for_model_channels(tensor, target, model.channels)
        layer = name.rpartition(".")[0]
        rows = class_rows.get(layer)
        if rows is not None:  # weight and bias, or neither: a bias without its weight does harm
            leaves = (f"{layer}.weight", f"{layer}.bias")
            mismatch = next(filter(None, (rows.mismatch(targets[leaf], tensors.get(leaf)) for leaf in leaves)), "")
        else:
            mismatch = _mismatch(target, tensor)
        if grow and tensor is not None and _contains(target, tensor):
            new_rows[name] = _copy_first_part(target, tensor)
        elif mismatch or tensor is None:
            skipped[name] = mismatch or NOT_IN_FILE
        elif rows is not None and not rows.copies_all(target):
            target[rows.model_rows] = tensor[rows.file_rows].to(target.device)
            new_rows[name] = tuple(sorted(set(range(len(target))).difference(rows.model_rows)))
        else:
            target.copy_(tensor)
            taken.append(name)
    if all(name.endswith(COUNTERS) for name in [*taken, *new_rows]):
        raise UserError(f"{stored.path}: no tensor matches this model; wrong family or size?")
    unused = tuple(name for name in stored.tensors if name not in targets)
    copies_classes = any(f"{layer}.weight" not in skipped for layer in class_rows)
    classes = tuple(model.names[number] for number, _ in common) if copies_classes else ()
    return TransferReport(str(stored.path), tuple(taken), new_rows, skipped, unused, classes)


def _mismatch(target: Tensor, tensor: Tensor | None) -> str:
    """Says why a tensor cannot be copied whole; empty if it can."""
    if tensor is None:
        return NOT_IN_FILE
    return "" if tensor.shape == target.shape else _different_shapes(target, tensor)


def _different_shapes(target: Tensor, tensor: Tensor) -> str:
    return f"shape {list(target.shape)} in the model, {list(tensor.shape)} in the file"


def _contains(target: Tensor, tensor: Tensor) -> bool:
    """Whether ``target`` is larger than ``tensor`` in some dimension, and smaller in none."""
    sizes = list(zip(target.shape, tensor.shape))
    return target.dim() == tensor.dim() and all(a >= b for a, b in sizes) and any(a > b for a, b in sizes)


def _copy_first_part(target: Tensor, tensor: Tensor) -> tuple[int, ...]:
    """Copies a smaller tensor to the beginning of every dimension. The rest of those rows becomes 0. Returns the rows
    left as initialized."""
    target[: len(tensor)] = 0
    target[tuple(map(slice, tensor.shape))] = tensor
    return tuple(range(len(tensor), len(target)))


def fill_model(model: Detector, stored: StoredWeights, *, grow: bool) -> dict[str, tuple[int, ...]]:
    """Copies matching weights into the ``model`` of a new run and logs the report.

    ``grow``: see `transfer_weights`. Returns the filled parameters: by name, the rows that are still random.
    """
    report = transfer_weights(model, stored, grow=grow)
    log = get_logger()
    if model.channels != 3 and model_of(stored).get("channels", 3) == 3:
        channels = counted(model.channels, "channel")
        log.info("%s: adapting its RGB kernels to images of %s", stored.path, channels)
    for line in report.lines():
        log.info("%s", line)
    filled = (name for name, _ in model.named_parameters() if name not in report.skipped)
    return {name: report.new_rows.get(name, ()) for name in filled}


def for_channels(kernel: Tensor, channels: int) -> Tensor:
    """Converts a kernel (O, 3, h, w) for RGB images to one (O, channels, h, w) with the same sum, as timm's
    `adapt_input_conv` does.

    A gray image, whose channels are all equal, gives the same output as before. More than three channels: the first
    three keep their weights, the others get the mean. Fewer: all get the mean.
    """
    if channels == 3:
        return kernel
    adapted = kernel.mean(1, keepdim=True).repeat(1, channels, 1, 1)
    if channels > 3:
        adapted[:, :3] = kernel
    return adapted * (3 / channels)


def _for_model_channels(tensor: Tensor, target: Tensor, channels: int) -> Tensor:
    """Adapts a kernel of RGB images to the images of the model. Returns other tensors of the first layer unchanged."""
    reads_rgb = tensor.ndim == 4 and tensor.shape[1] == 3
    if reads_rgb and target.shape[1] == channels:
        return for_channels(tensor, channels)
    return tensor


def _for_both_branches(names: Iterable[str], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adds the tensors of a single branch under the names of the model's second branch, if the file has none of it."""
    first_names = {name: name.replace(f".{ONE_TO_ONE}", ".") for name in names if f".{ONE_TO_ONE}" in name}
    if any(name in tensors for name in first_names):
        return tensors
    return tensors | {second: tensors[first] for second, first in first_names.items() if first in tensors}


def _class_rows(
    model: Detector, file_names: Sequence[str] | None
) -> tuple[list[tuple[int, int]], dict[str, _ClassRows]]:
    """Pairs the classes that the model and the file have in common.

    Returns their numbers in the model and in the file; and for each output layer its rows to copy, with those that
    belong to no class. Both are empty if the file has no class names.
    """
    if file_names is None:
        return [], {}
    number_in_file = {name.strip().lower(): number for number, name in reversed(list(enumerate(file_names)))}
    model_keys = enumerate(name.strip().lower() for name in model.names)
    common = [(number, number_in_file[key]) for number, key in model_keys if key in number_in_file]
    head = f"model.{len(model.model) - 1}."
    class_rows = {}
    for name, (groups, rows_before) in model.head.class_rows().items():
        row_pairs = [(row, row) for row in range(rows_before)]
        row_pairs += [(rows_before + number, rows_before + file_number) for number, file_number in common]
        model_size = rows_before + model.num_classes  # of a group
        file_size = rows_before + len(file_names)
        class_rows[head + name] = _ClassRows(
            model_rows=[group * model_size + row for group in range(groups) for row, _ in row_pairs],
            file_rows=[group * file_size + row for group in range(groups) for _, row in row_pairs],
            file_size=groups * file_size,
        )
    return common, class_rows
