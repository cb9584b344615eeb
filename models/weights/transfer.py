"""Copies the tensors of a checkpoint that match those of a detector, and reports all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from models.detector import Detector
from models.heads.base import ONE_TO_ONE
from models.weights.load import class_count, names_for
from models.weights.read import COUNTERS, StoredWeights, read_weights
from utils.class_names import class_key
from utils.errors import UserError
from utils.strings import counted, listed

NOT_IN_FILE = "not in the file"


@dataclass(frozen=True, slots=True)
class TransferReport:
    """The tensors of a model that were copied from a file."""

    source: str
    taken: tuple[str, ...]  # tensors copied whole
    new_rows: dict[str, tuple[int, ...]]  # tensors copied in part, with the rows that the file does not have
    skipped: dict[str, str]  # the model's other tensors, with the reason
    unused: tuple[str, ...]  # tensors of the file that the model does not have
    classes: tuple[str, ...]  # names of the classes whose rows were copied
    similar: tuple[tuple[str, str], ...]  # new classes, each with that of the file whose rows it got
    adapted_channels: int | None = None  # channels of the images that the kernels of RGB images were adapted to, if any

    def pretrained(self, model: Detector) -> dict[str, tuple[int, ...]]:
        """Returns the parameters of ``model`` that were copied: by name, the rows of new classes."""
        names = (name for name, _ in model.named_parameters() if name not in self.skipped)
        return {name: self.new_rows.get(name, ()) for name in names}

    def lines(self) -> list[str]:
        """Returns lines for the log: tensors that were copied, adapted, skipped (with the reasons), and unused."""
        total = len(self.taken) + len(self.new_rows) + len(self.skipped)
        summary = f"{self.source}: {len(self.taken)} of {total} tensors loaded"
        if self.new_rows:
            rows = "no class in common"
            if self.classes:
                rows = f"rows of {counted(len(self.classes), 'common class')}: {listed(self.classes)}"
            if self.similar:
                rows += f"; {listed([f'{name} starts from {other}' for name, other in self.similar])}"
            summary += f", {len(self.new_rows)} loaded partly ({rows})"
        names_by_reason: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():  # all different shapes share a line, which shows the first
            key = "shape" if reason.startswith("shape ") else reason
            names_by_reason.setdefault(key, []).append(name)
        lines = [summary]
        if self.adapted_channels is not None:
            channels = counted(self.adapted_channels, "channel")
            lines.append(f"{self.source}: adapting its RGB kernels to images of {channels}")
        for names in names_by_reason.values():
            reason = self.skipped[names[0]]
            lines.append(f"left as initialized: {_layers(names)}: {reason}")
        if self.unused:
            lines.append(f"in the file, but not in the model: {_layers(self.unused)}")
        return lines


def _layers(names: Sequence[str]) -> str:
    """Lists layers with their numbers of tensors: ``model.22.cv3 (6 tensors)``."""
    counts = Counter(".".join(name.split(".")[:3]) for name in names)
    return listed([f"{layer} ({counted(count, 'tensor')})" for layer, count in counts.items()])


@torch.no_grad()
def transfer_weights(
    model: Detector, source: str | Path | StoredWeights, *, similar: Mapping[int, int] | None = None
) -> TransferReport:
    """Copies the tensors of a checkpoint that match those of a detector in name and shape.

    For output layers, it copies the rows of the classes that both have, by name (ignoring case and outer spaces). If
    the file has no class names, output layers are copied if they have as many classes. The kernel that reads RGB images
    is adapted to a model with other channels. A head with two branches gets the tensors of a single branch twice.

    Args:
        model: changed in place.
        source: the checkpoint, or its path.
        similar: by number of a class of the model, the number of a class of the file. A class whose name the file lacks
            gets the rows of this one, which still count as new.

    Raises UserError for an unreadable file, and if no tensor matches.
    """
    stored = source if isinstance(source, StoredWeights) else read_weights(source)
    report, copies = match_weights(model, stored, similar=similar)
    targets = model.state_dict()
    for name, (tensor, rows) in copies.items():
        target = targets[name]
        if rows is None:
            target.copy_(tensor)
        else:
            target[rows.model_rows] = tensor[rows.file_rows].to(target.device)
    return report


@torch.no_grad()
def match_weights(
    model: Detector, stored: StoredWeights, *, similar: Mapping[int, int] | None = None
) -> tuple[TransferReport, dict[str, tuple[Tensor, _ClassRows | None]]]:
    """Decides what `transfer_weights` copies, by tensor of the model, without copying: the model may be on the meta
    device. For each, returns the tensor of the file, and the rows if not all are copied. The arguments and errors are
    those of `transfer_weights`."""
    targets = model.state_dict()
    tensors, adapted_channels = _tensors_for(model, stored)
    common, similar_names, class_rows = _common_classes(model, stored, similar or {})

    copies: dict[str, tuple[Tensor, _ClassRows | None]] = {}
    new_rows: dict[str, tuple[int, ...]] = {}
    skipped: dict[str, str] = {}
    for name, target in targets.items():
        layer = name.rpartition(".")[0]
        rows = class_rows.get(layer)
        # An output layer's weight and bias are copied together: a bias without its weight would do harm.
        together = [name] if rows is None else [name, f"{layer}.weight", f"{layer}.bias"]
        file_size = None if rows is None else rows.file_size
        reasons = [_mismatch(targets[part], tensors.get(part), file_size) for part in together]
        if rows is not None and not rows.model_rows:
            reasons.append("the file and the model have no class name in common")
        if any(reasons):
            skipped[name] = next(filter(None, reasons))
            continue
        tensor = tensors[name]
        copies[name] = (tensor, rows)
        if rows and (rows.new_rows or rows.model_rows != rows.file_rows or len(tensor) != len(target)):
            new_rows[name] = tuple(rows.new_rows)
    if all(name.endswith(COUNTERS) for name in copies):
        raise UserError(f"{stored.path}: no tensor matches this model; wrong family or size?")
    copies_classes = any(f"{layer}.weight" not in skipped for layer in class_rows)
    report = TransferReport(
        source=str(stored.path),
        taken=tuple(name for name in copies if name not in new_rows),
        new_rows=new_rows,
        skipped=skipped,
        unused=tuple(name for name in stored.tensors if name not in targets),
        classes=common if copies_classes else (),
        similar=similar_names if copies_classes else (),
        adapted_channels=adapted_channels,
    )
    return report, copies


def _tensors_for(model: Detector, stored: StoredWeights) -> tuple[dict[str, Tensor], int | None]:
    """Returns the tensors of a file by the names of the model: those of a single branch twice for a head with two, and
    the kernel that reads RGB images for the model's channels, with their number if it was adapted."""
    tensors = dict(stored.tensors)
    targets = model.state_dict()
    first_names = {name: name.replace(f".{ONE_TO_ONE}", ".") for name in targets if f".{ONE_TO_ONE}" in name}
    if not any(name in tensors for name in first_names):
        tensors |= {name: tensors[first] for name, first in first_names.items() if first in tensors}
    is_adapted = False
    for name in targets.keys() & tensors.keys():
        kernel = tensors[name]
        reads_rgb = name.startswith("model.0.") and kernel.ndim == 4 and kernel.shape[1] == 3
        if reads_rgb and targets[name].shape[1] == model.channels != 3:
            tensors[name] = for_channels(kernel, model.channels)
            is_adapted = True
    return tensors, model.channels if is_adapted else None


def _mismatch(target: Tensor, tensor: Tensor | None, file_rows: int | None = None) -> str:
    """Returns why a tensor of a file does not fit that of the model; empty if it does. ``file_rows``: its number of
    rows, if that may differ from the model's."""
    if tensor is None:
        return NOT_IN_FILE
    expected = target.shape if file_rows is None else (file_rows, *target.shape[1:])
    if tensor.shape == expected:
        return ""
    return f"shape {list(target.shape)} in the model, {list(tensor.shape)} in the file"


class _ClassRows(NamedTuple):
    """Rows of an output layer to copy: row ``file_rows[i]`` of the file to row ``model_rows[i]`` of the model."""

    model_rows: list[int]
    file_rows: list[int]
    file_size: int  # rows of the file's layer
    new_rows: list[int]  # rows of classes that the file lacks, whether they are copied from a similar one or not


def _common_classes(
    model: Detector, stored: StoredWeights, similar: Mapping[int, int]
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...], dict[str, _ClassRows]]:
    """Returns the names of the classes that the model and the file have in common, those of each new class and its
    ``similar`` one, and for each output layer its rows to copy: those of these classes, and those that belong to no
    class. All are empty if the file has no class names."""
    file_classes = class_count(model, stored.shapes)
    file_names = names_for(file_classes, stored.names, stored.path) if file_classes else None
    if file_names is None:
        return (), (), {}
    number_in_file = {class_key(name): number for number, name in reversed(list(enumerate(file_names)))}
    pairs = [  # number in the model, and in the file; of equal names in the file, the first
        (number, number_in_file[class_key(name)])
        for number, name in enumerate(model.names)
        if class_key(name) in number_in_file
    ]
    new = sorted(set(range(model.num_classes)).difference(number for number, _ in pairs))
    similar_pairs = [(number, similar[number]) for number in new if number in similar]
    class_rows = {}
    for layer, (groups, before) in model.head.class_rows().items():
        model_size = before + model.num_classes  # rows of a group
        file_size = before + len(file_names)
        rows = [(row, row) for row in range(before)] + [(before + a, before + b) for a, b in pairs + similar_pairs]
        class_rows[f"model.{len(model.model) - 1}.{layer}"] = _ClassRows(
            model_rows=[group * model_size + row for group in range(groups) for row, _ in rows],
            file_rows=[group * file_size + row for group in range(groups) for _, row in rows],
            file_size=groups * file_size,
            new_rows=[group * model_size + before + number for group in range(groups) for number in new],
        )
    similar_names = tuple((model.names[a], file_names[b]) for a, b in similar_pairs)
    return tuple(model.names[number] for number, _ in pairs), similar_names, class_rows


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
