"""Copies the tensors of a checkpoint that fit into a detector, and reports all others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
    partly: tuple[str, ...]  # class tensors of which only the rows of ``classes`` (and rows of no class) were copied
    skipped: dict[str, str] = field(default_factory=dict)  # the model's other tensors, with the reason
    unused: tuple[str, ...] = ()  # tensors of the file that the model does not have
    classes: tuple[str, ...] = ()  # names of the classes whose rows were copied
    new_rows: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of ``partly``: the rows left as initialized

    def lines(self) -> list[str]:
        """For the log: what was copied, what was not and why, and what is unused."""
        total = len(self.taken) + len(self.partly) + len(self.skipped)
        first = f"{self.source}: {len(self.taken)} of {total} tensors loaded"
        if self.partly:
            common = f"rows of {counted(len(self.classes), 'common class')}: {listed(self.classes)}"
            first += f", {len(self.partly)} loaded partly ({common if self.classes else 'no class in common'})"
        skipped: dict[str, tuple[str, list[str]]] = {}
        for name, reason in self.skipped.items():  # one line, with the first as the example, for all shapes that differ
            key = "shape" if reason.startswith("shape ") else reason
            skipped.setdefault(key, (reason, []))[1].append(name)
        lines = [f"left as initialized: {_layers(names)}: {reason}" for reason, names in skipped.values()]
        if self.unused:
            lines.append(f"in the file, but not in the model: {_layers(self.unused)}")
        return [first, *lines]


def _layers(names: Sequence[str]) -> str:
    """Layers with their numbers of tensors: ``model.22.cv3 (6 tensors)``."""
    counts: dict[str, int] = {}
    for name in names:
        layer = ".".join(name.split(".")[:3])
        counts[layer] = counts.get(layer, 0) + 1
    return listed([f"{layer} ({counted(count, 'tensor')})" for layer, count in counts.items()])


def _contains(target: Tensor, source: Tensor) -> bool:
    """Whether ``target`` is larger than ``source``, and nowhere smaller."""
    sizes = list(zip(target.shape, source.shape))
    return target.dim() == source.dim() and all(a >= b for a, b in sizes) and any(a > b for a, b in sizes)


def _shapes(target: Tensor, source: Tensor) -> str:
    return f"shape {list(target.shape)} here, {list(source.shape)} there"


@dataclass(frozen=True, slots=True)
class _ClassRows:
    """How the rows of one output tensor are divided, in the model and in the file, and which classes they share."""

    groups: int  # anchors
    before: int  # rows of a group before its classes
    here: int  # classes of the model
    there: int  # classes of the file
    pairs: tuple[tuple[int, int], ...]  # (index here, index there) of the common classes

    @property
    def is_identity(self) -> bool:
        return self.here == self.there and self.pairs == tuple((i, i) for i in range(self.here))

    def new_rows(self) -> tuple[int, ...]:
        """The model's rows that are not copied."""
        size, common = self.before + self.here, {here for here, _ in self.pairs}
        new = [self.before + i for i in range(self.here) if i not in common]
        return tuple(group * size + row for group in range(self.groups) for row in new)

    def misfit(self, target: Tensor, source: Tensor | None) -> str:
        """Why the rows cannot be copied; empty if they can."""
        if source is None:
            return NOT_IN_FILE
        if source.shape[1:] != target.shape[1:] or source.shape[0] != self.groups * (self.before + self.there):
            return _shapes(target, source)
        return "" if self.pairs or self.before else "the file and the model have no class name in common"

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies the rows of common classes, and the rows before the classes."""
        ours = target.view(self.groups, self.before + self.here, *target.shape[1:])
        theirs = source.view(self.groups, self.before + self.there, *source.shape[1:])
        ours[:, : self.before] = theirs[:, : self.before]
        if self.pairs:
            here, there = (torch.tensor(side) + self.before for side in zip(*self.pairs))
            ours[:, here.to(ours.device)] = theirs[:, there].to(ours.device)


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
    rows = _class_rows(model, names_for(class_count(model, stored.shapes), stored.names, stored.path))
    taken, partly, skipped, new_rows = [], [], {}, {}
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
            partly.append(name)
            new_rows[name] = tuple(range(len(found), len(target)))
        elif reason:
            skipped[name] = reason
        elif layer in rows and not rows[layer].is_identity:
            rows[layer].copy(target, found)
            partly.append(name)
            new_rows[name] = rows[layer].new_rows()
        else:
            target.copy_(found)
            taken.append(name)
    if all(name.endswith(COUNTERS) for name in [*taken, *partly]):
        raise UserError(f"{stored.path}: no tensor fits this model; is it of another family or size?")
    unused = tuple(name for name in stored.tensors if name not in own)
    used = [rows[layer] for layer in rows if f"{layer}.weight" not in skipped]
    classes = tuple(model.names[i] for i, _ in used[0].pairs) if used else ()
    return TransferReport(str(stored.path), tuple(taken), tuple(partly), skipped, unused, classes, new_rows)


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
    """A kernel (O, 3, h, w) of RGB images as one (O, channels, h, w).

    The first three channels keep theirs, the others get the mean, and with less than three channels all do; the sum
    stays the same, so that an image whose channels are all equal gives what its RGB image gives (as `adapt_input_conv`
    of timm).
    """
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


def _class_rows(model: Detector, names: Sequence[str] | None) -> dict[str, _ClassRows]:
    """By name of the output layer; empty if the file names no classes."""
    if names is None:
        return {}
    there = {name.strip().lower(): i for i, name in reversed(list(enumerate(names)))}
    keys = enumerate(name.strip().lower() for name in model.names)
    pairs = tuple((i, there[key]) for i, key in keys if key in there)
    head = f"model.{len(model.model) - 1}."
    return {
        head + name: _ClassRows(groups, before, model.num_classes, len(names), pairs)
        for name, (groups, before) in model.head.class_rows().items()
    }
