"""Copies the tensors of a checkpoint that match those of a detector, and reports all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from models.detector import Detector
from models.heads.base import ONE_TO_ONE
from models.weights.load import class_count, names_for
from models.weights.read import COUNTERS, StoredWeights, read_weights
from utils.class_names import class_key
from utils.errors import UserError
from utils.logger import get_logger
from utils.strings import counted, listed

NOT_IN_FILE = "not in the file"


@dataclass(frozen=True, slots=True)
class TransferReport:
    """The tensors of a model that were copied from a file."""

    source: str
    taken: tuple[str, ...]  # tensors copied whole
    new_rows: dict[str, tuple[int, ...]]  # tensors copied in part, with the rows left as initialized
    skipped: dict[str, str]  # the model's other tensors, with the reason
    unused: tuple[str, ...]  # tensors of the file that the model does not have
    classes: tuple[str, ...]  # names of the classes whose rows were copied
    grown: bool  # whether the first rows of larger tensors were copied, whatever their classes are called
    adapted_channels: int | None = None  # channels of the images that the kernels of RGB images were adapted to, if any

    def lines(self) -> list[str]:
        """Returns lines for the log: tensors that were adapted, copied, skipped (with the reasons), and unused."""
        total = len(self.taken) + len(self.new_rows) + len(self.skipped)
        summary = f"{self.source}: {len(self.taken)} of {total} tensors loaded"
        if self.new_rows:
            rows = "their first rows" if self.grown else "no class in common"
            if self.classes:
                rows = f"rows of {counted(len(self.classes), 'common class')}: {listed(self.classes)}"
            summary += f", {len(self.new_rows)} loaded partly ({rows})"
        names_by_reason: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():  # all different shapes share a line, which shows the first
            key = "shape" if reason.startswith("shape ") else reason
            names_by_reason.setdefault(key, []).append(name)
        lines = []
        if self.adapted_channels is not None:
            channels = counted(self.adapted_channels, "channel")
            lines.append(f"{self.source}: adapting its RGB kernels to images of {channels}")
        lines.append(summary)
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
    """Rows of an output layer that are copied: row ``file_rows[i]`` of the file to row ``model_rows[i]`` of the
    model."""

    model_rows: list[int]
    file_rows: list[int]
    file_size: int  # rows of the file's layer

    def mismatch(self, target: Tensor, tensor: Tensor | None) -> str:
        """Returns why the rows cannot be copied; empty if they can."""
        if tensor is None:
            return NOT_IN_FILE
        if tensor.shape != (self.file_size, *target.shape[1:]):
            return _different_shapes(target, tensor)
        return "" if self.model_rows else "the file and the model have no class name in common"

    def copies_all(self, target: Tensor) -> bool:
        """Returns True if every row of the file is copied to the same row of ``target``, which has no others."""
        has_same_size = self.file_size == len(target)
        return has_same_size and self.model_rows == self.file_rows == list(range(len(target)))


@torch.no_grad()
def transfer_weights(model: Detector, source: str | Path | StoredWeights, *, grow: bool = False) -> TransferReport:
    """Copies the tensors of a checkpoint that match those of a detector in name and shape.

    For output layers, it copies the rows of the classes that both have, by name (ignoring case and outer spaces). If
    the file has no class names, output layers are copied if they have as many classes. The kernel that reads RGB images
    is adapted to a model with other channels. A head with two branches gets the tensors of a single branch twice.

    Args:
        model: changed in place.
        source: the checkpoint, or its path.
        grow: whether a larger tensor of the model gets the file's as its first part. The rest of these rows becomes 0,
            so a model that has the file's classes first scores them as the file's model does.

    Raises UserError for an unreadable file, and if no tensor matches.
    """
    stored = source if isinstance(source, StoredWeights) else read_weights(source)
    targets = model.state_dict()
    shared = _shared_classes(model, stored)
    tensors = _for_both_branches(targets, stored.tensors)
    adapted_kernels = _kernels_for_channels(targets, tensors, model.channels)
    transfer = _Transfer(targets, tensors | adapted_kernels, shared.rows, grow=grow)
    uncopied_rows: dict[str, tuple[int, ...] | None] = {}  # by copied tensor; None: copied whole
    skipped: dict[str, str] = {}
    grown = False
    for name, target in targets.items():
        decision = transfer.decide(name)
        if isinstance(decision, _Skip):
            skipped[name] = decision.reason
        else:
            uncopied_rows[name] = decision.copy(target)
            grown |= isinstance(decision, _CopyFirstPart)
    if all(name.endswith(COUNTERS) for name in uncopied_rows):
        raise UserError(f"{stored.path}: no tensor matches this model; wrong family or size?")
    copies_classes = any(f"{layer}.weight" not in skipped for layer in shared.rows)
    return TransferReport(
        source=str(stored.path),
        taken=tuple(name for name, rows in uncopied_rows.items() if rows is None),
        new_rows={name: rows for name, rows in uncopied_rows.items() if rows is not None},
        skipped=skipped,
        unused=tuple(name for name in stored.tensors if name not in targets),
        classes=shared.names if copies_classes else (),
        grown=grown,
        adapted_channels=model.channels if adapted_kernels else None,
    )


class _Skip(NamedTuple):
    """Leaves a tensor of the model as it is."""

    reason: str


class _Copy(Protocol):
    """A way to copy a tensor of the file."""

    def copy(self, target: Tensor) -> tuple[int, ...] | None:
        """Changes ``target`` in place. Returns the rows left as initialized; None if it was copied whole."""


class _CopyWhole(NamedTuple):
    """Copies a tensor of the file."""

    tensor: Tensor

    def copy(self, target: Tensor) -> None:
        target.copy_(self.tensor)


class _CopyRows(NamedTuple):
    """Copies the rows of the classes that the file and the model have in common."""

    tensor: Tensor
    rows: _ClassRows

    def copy(self, target: Tensor) -> tuple[int, ...]:
        target[self.rows.model_rows] = self.tensor[self.rows.file_rows].to(target.device)
        return tuple(sorted(set(range(len(target))).difference(self.rows.model_rows)))


class _CopyFirstPart(NamedTuple):
    """Copies a smaller tensor to the beginning of every dimension. The rest of those rows becomes 0."""

    tensor: Tensor

    def copy(self, target: Tensor) -> tuple[int, ...]:
        count = len(self.tensor)
        target[:count] = 0
        target[tuple(slice(size) for size in self.tensor.shape)] = self.tensor
        return tuple(range(count, len(target)))


@dataclass(frozen=True)
class _Transfer:
    """Decides how each tensor of a model is copied from a file."""

    targets: Mapping[str, Tensor]  # tensors of the model
    tensors: Mapping[str, Tensor]  # tensors of the file, adapted to the branches and channels of the model
    class_rows: Mapping[str, _ClassRows]  # rows of the output layers, by name
    grow: bool

    def decide(self, name: str) -> _Skip | _Copy:
        """Chooses how the model's tensor ``name`` is copied."""
        target = self.targets[name]
        tensor = self.tensors.get(name)
        if tensor is None:
            return _Skip(NOT_IN_FILE)
        if self.grow and _contains(target, tensor):
            return _CopyFirstPart(tensor)
        layer = name.rpartition(".")[0]
        rows = self.class_rows.get(layer)
        if rows is None:
            same_shape = tensor.shape == target.shape
            return _CopyWhole(tensor) if same_shape else _Skip(_different_shapes(target, tensor))
        reason = self._layer_mismatch(layer, rows)
        if reason:
            return _Skip(reason)
        return _CopyWhole(tensor) if rows.copies_all(target) else _CopyRows(tensor, rows)

    def _layer_mismatch(self, layer: str, rows: _ClassRows) -> str:
        """Returns why an output layer cannot be copied; empty if it can. Its weight and bias are copied together: a
        bias without its weight would do harm."""
        for name in (f"{layer}.weight", f"{layer}.bias"):
            reason = rows.mismatch(self.targets[name], self.tensors.get(name))
            if reason:
                return reason
        return ""


def _different_shapes(target: Tensor, tensor: Tensor) -> str:
    return f"shape {list(target.shape)} in the model, {list(tensor.shape)} in the file"


def _contains(target: Tensor, tensor: Tensor) -> bool:
    """Returns True if ``target`` is larger than ``tensor`` in some dimension, and smaller in none."""
    sizes = list(zip(target.shape, tensor.shape))
    return target.dim() == tensor.dim() and all(a >= b for a, b in sizes) and any(a > b for a, b in sizes)


def fill_model(model: Detector, stored: StoredWeights, *, grow: bool) -> dict[str, tuple[int, ...]]:
    """Copies matching weights into the ``model`` of a new run and logs the report.

    ``grow``: see `transfer_weights`. Returns the filled parameters: by name, the rows that are still random.
    """
    report = transfer_weights(model, stored, grow=grow)
    for line in report.lines():
        get_logger().info("%s", line)
    filled = (name for name, _ in model.named_parameters() if name not in report.skipped)
    return {name: report.new_rows.get(name, ()) for name in filled}


def for_channels(kernel: Tensor, channels: int) -> Tensor:
    """Converts a kernel (O, 3, h, w) for RGB images to one (O, channels, h, w) with the same sum, as timm's
    `adapt_input_conv` does.

    A gray image, whose channels are all equal, gives the same output as before. With more than three channels, the
    first three keep their weights and the others get the mean; with fewer, all get the mean. All are then scaled by 3 /
    channels.
    """
    if channels == 3:
        return kernel
    adapted = kernel.mean(1, keepdim=True).repeat(1, channels, 1, 1)
    if channels > 3:
        adapted[:, :3] = kernel
    return adapted * (3 / channels)


def _kernels_for_channels(
    targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor], channels: int
) -> dict[str, Tensor]:
    """Returns the kernels of a file that read RGB images, adapted to the ``channels`` of the model's images."""
    if channels == 3:
        return {}
    adapted = {}
    for name in targets.keys() & tensors.keys():
        kernel = tensors[name]
        reads_rgb = name.startswith("model.0.") and kernel.ndim == 4 and kernel.shape[1] == 3
        if reads_rgb and targets[name].shape[1] == channels:
            adapted[name] = for_channels(kernel, channels)
    return adapted


def _for_both_branches(names: Iterable[str], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adds the tensors of a single branch under the names of the model's second branch, if the file has none of it."""
    first_names = {name: name.replace(f".{ONE_TO_ONE}", ".") for name in names if f".{ONE_TO_ONE}" in name}
    if any(name in tensors for name in first_names):
        return tensors
    return tensors | {second: tensors[first] for second, first in first_names.items() if first in tensors}


class _SharedClasses(NamedTuple):
    """The classes that a model and a file have in common, and the rows of output layers to copy for them."""

    names: tuple[str, ...]
    rows: dict[str, _ClassRows]  # rows by output layer; empty if the file has no class names


def _shared_classes(model: Detector, stored: StoredWeights) -> _SharedClasses:
    """Finds the classes that the model and the file have in common, by name."""
    file_classes = class_count(model, stored.shapes)
    file_names = names_for(file_classes, stored.names, stored.path) if file_classes else None
    if file_names is None:
        return _SharedClasses((), {})
    common = _common_classes(model.names, file_names)
    names = tuple(model.names[pair.number] for pair in common)
    return _SharedClasses(names, _class_rows(model, common, len(file_names)))


class _CommonClass(NamedTuple):
    """A class that the model and the file have in common."""

    number: int  # index in the model
    file_number: int  # index in the file


def _common_classes(names: Sequence[str], file_names: Sequence[str]) -> list[_CommonClass]:
    """Pairs the classes that the model and the file have in common; of equal names in the file, the first."""
    number_in_file = {class_key(name): number for number, name in reversed(list(enumerate(file_names)))}
    keys = enumerate(class_key(name) for name in names)
    return [_CommonClass(number, number_in_file[key]) for number, key in keys if key in number_in_file]


def _class_rows(model: Detector, common: Sequence[_CommonClass], file_classes: int) -> dict[str, _ClassRows]:
    """Returns for each output layer its rows to copy: the rows of the classes in ``common``, and the rows that belong
    to no class. ``file_classes``: number of classes of the file."""
    head = f"model.{len(model.model) - 1}."
    class_rows = {}
    for name, (groups, rows_before) in model.head.class_rows().items():
        before = range(rows_before)
        rows = [*before, *(rows_before + pair.number for pair in common)]
        file_rows = [*before, *(rows_before + pair.file_number for pair in common)]
        model_size = rows_before + model.num_classes  # number of rows in a group
        file_size = rows_before + file_classes
        class_rows[head + name] = _ClassRows(
            model_rows=[group * model_size + row for group in range(groups) for row in rows],
            file_rows=[group * file_size + row for group in range(groups) for row in file_rows],
            file_size=groups * file_size,
        )
    return class_rows
