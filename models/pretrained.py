"""Detectors and weights from checkpoint files: our own, and public ones of the same families.

Foreign files are read as inert data (foreign_file.py). What cannot be taken is reported, never dropped in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.detector import Detector, build_detector, build_on_meta
from models.foreign_file import ForeignFile
from models.spec import known_models, load_spec
from models.unpickle import Record, is_module
from utils.checkpoint_file import FORMAT, read_checkpoint
from utils.errors import UserError

COUNTERS = "num_batches_tracked"  # batch norm's step counters: no use without momentum=None


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """What a checkpoint file holds, whoever wrote it."""

    path: Path
    tensors: dict[str, Tensor]  # EMA weights if there, floating ones float32
    names: tuple[str, ...] | None  # of the classes
    content: dict[str, Any]  # our checkpoint; for a foreign one, what val.py and detect.py need of it

    @property
    def is_ours(self) -> bool:
        return self.content.get("format") == FORMAT


@dataclass(frozen=True, slots=True)
class TransferReport:
    """Which tensors of a model were taken from a file."""

    source: str
    taken: tuple[str, ...]  # whole tensors
    partly: tuple[str, ...]  # class tensors of which only the rows in ``classes`` (and rows of no class) were taken
    skipped: dict[str, str] = field(default_factory=dict)  # the model's other tensors, and why
    unused: tuple[str, ...] = ()  # tensors of the file that the model has no place for
    classes: tuple[str, ...] = ()  # names of classes whose rows were taken

    def summary(self) -> str:
        """One line for the log."""
        total = len(self.taken) + len(self.partly) + len(self.skipped)
        line = f"{self.source}: {len(self.taken)} of {total} tensors taken"
        if self.partly:
            line += f", {len(self.partly)} more for {len(self.classes)} coinciding classes"
        if self.skipped:
            first, why = next(iter(self.skipped.items()))
            line += f"; {len(self.skipped)} left as initialised (first: {first}, {why})"
        return line + (f"; {len(self.unused)} in the file have no place here" if self.unused else "")


def load_detector(path: str | Path) -> tuple[Detector, dict[str, Any]]:
    """A detector in eval mode, float32 on the CPU, and its checkpoint's content.

    Of our checkpoints the EMA weights are taken if there are any. A foreign file is recognised as one of the built-in
    models by its tensors' shapes; the content then holds ``format`` ("foreign"), ``names`` and ``imgsz`` alone.
    Raises UserError for a file that is missing, damaged, not a checkpoint, or of no known model.
    """
    stored = read_weights(path)
    if stored.is_ours:
        names = stored.names or ()
        detector = build_detector(stored.content["model_spec"], len(names), names=names)
    else:
        name, num_classes = recognise(stored)
        names = stored.names if stored.names and len(stored.names) == num_classes else None
        detector = build_detector(name, num_classes, names=names)
    problem = _misfit(detector, stored.tensors)
    if problem:
        raise UserError(f"{path}: its weights do not fit its model ({problem})")
    detector.load_state_dict(stored.tensors, strict=False)  # strict, but for the counters
    return detector.eval(), stored.content


def read_weights(path: str | Path) -> StoredWeights:
    """The weights in a checkpoint, ours or foreign. Raises UserError for anything else, running no code."""
    with ForeignFile(path) as file:
        content = file.content
        if isinstance(content, dict) and content.get("format") == FORMAT:
            return _read_own(Path(path))
        module = _find_model(content)
        tensors = _plain_names(file.state_dict(module))
        if not tensors:
            raise UserError(f"{path}: holds no weights of a detector (neither 'model' nor 'ema' nor a state dict)")
        names = _class_names(module, content)
        summary = {"format": "foreign", "names": list(names or ()), "imgsz": _image_size(content)}
        return StoredWeights(Path(path), tensors, names, summary)


def _read_own(path: Path) -> StoredWeights:
    content = read_checkpoint(path)
    missing = [key for key in ("model_spec", "names", "imgsz") if not content.get(key)]
    if not (content.get("ema") or content.get("model")):  # best.pt holds the averaged weights alone
        missing.append("weights")
    if missing:
        raise UserError(f"{path}: damaged checkpoint (no {', '.join(missing)})")
    weights = content.get("ema") or content["model"]
    tensors = {k: v.float() if v.is_floating_point() else v for k, v in weights.items()}
    return StoredWeights(path, _plain_names(tensors), tuple(content["names"]), content)


def recognise(stored: StoredWeights) -> tuple[str, int]:
    """Name and number of classes of the built-in model whose tensors have exactly these names and shapes."""
    shapes = _shapes(stored.tensors)
    for name in known_models():
        spec = load_spec(name)
        for num_classes in _possible_classes(shapes, len(spec.layers) - 1):
            detector = build_on_meta(spec, num_classes, tuple(map(str, range(num_classes))))
            if _shapes(detector.state_dict()) == shapes:
                return name, num_classes
    raise UserError(f"{stored.path}: its tensors are those of no model known here (yolov5, yolov8, yolo11; unfused)")


def _possible_classes(shapes: Mapping[str, torch.Size], head: int) -> list[int]:
    """Numbers of classes that the output layers of an anchor-free or an anchor head at this index would mean."""
    found = []
    if shape := shapes.get(f"model.{head}.cv3.0.2.bias"):
        found.append(shape[0])
    outputs, anchors = shapes.get(f"model.{head}.m.0.bias"), shapes.get(f"model.{head}.anchors")
    if outputs and anchors and len(anchors) == 3 and anchors[1]:
        found.append(outputs[0] // anchors[1] - 5)
    return [count for count in found if count >= 1]


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items() if not name.endswith(COUNTERS)}


def _misfit(detector: Detector, tensors: Mapping[str, Tensor]) -> str:
    """The first difference in names or shapes, or nothing."""
    wanted, found = _shapes(detector.state_dict()), _shapes(tensors)
    for name in [*wanted, *found]:
        if wanted.get(name) != found.get(name):
            wants, has = (str(list(s[name])) if name in s else "nothing" for s in (wanted, found))
            return f"{name}: the model has {wants}, the file {has}"
    return ""


def _find_model(content: Any) -> Any:
    """The module or state dict inside a foreign checkpoint: EMA before model, as its writers mean it."""
    if isinstance(content, dict):
        for key in ("ema", "model", "state_dict"):
            value = content.get(key)
            if is_module(value) or (isinstance(value, dict) and value):
                return value
    return content


def _plain_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names without the prefix that (Distributed)DataParallel puts before all of them."""
    if tensors and all(name.startswith("module.") for name in tensors):
        return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    return tensors


def _class_names(module: Any, content: Any) -> tuple[str, ...] | None:
    """Class names, which public files hold on the module (or beside it), as a list or by number."""
    holders = [module] if isinstance(module, Record) else []
    holders += [content] if isinstance(content, dict) else []
    for holder in holders:
        names = holder.get("names")
        if isinstance(names, dict) and sorted(map(str, names)) == sorted(map(str, range(len(names)))):
            names = [text for _, text in sorted(names.items(), key=lambda item: int(item[0]))]
        if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
            return tuple(names)
    return None


def _image_size(content: Any) -> int:
    settings = content.get("train_args") if isinstance(content, dict) else None
    size = settings.get("imgsz") if isinstance(settings, dict) else None
    return size if isinstance(size, int) and 0 < size < 2**14 else 640


@dataclass(frozen=True, slots=True)
class _ClassRows:
    """How the rows of one output tensor divide, here and in the file, and which classes coincide."""

    groups: int  # anchors
    before: int  # rows of a group before its classes
    here: int  # classes of the model
    there: int  # classes of the file
    pairs: tuple[tuple[int, int], ...]  # (index here, index there) of the coinciding ones

    @property
    def is_identity(self) -> bool:
        return self.here == self.there and self.pairs == tuple((i, i) for i in range(self.here))

    def misfit(self, target: Tensor, source: Tensor | None) -> str:
        """Why the rows cannot be taken, or nothing."""
        if source is None:
            return "not in the file"
        if source.shape[1:] != target.shape[1:] or source.shape[0] != self.groups * (self.before + self.there):
            return f"shape {list(target.shape)} here, {list(source.shape)} there"
        return "" if self.pairs or self.before else "no class of the file has a name of the model's"

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies the paired class rows and what precedes the classes."""
        ours = target.view(self.groups, self.before + self.here, *target.shape[1:])
        theirs = source.view(self.groups, self.before + self.there, *source.shape[1:])
        ours[:, : self.before] = theirs[:, : self.before]
        if self.pairs:
            here, there = (torch.tensor(side) + self.before for side in zip(*self.pairs))
            ours[:, here.to(ours.device)] = theirs[:, there].to(ours.device)


@torch.no_grad()
def transfer_weights(model: Detector, path: str | Path) -> TransferReport:
    """Fills a detector from a checkpoint with whatever fits: tensors of equal name and shape, and of the output layers
    the rows of those classes that both know by name (case and outer spaces aside).

    Where the file has no class names, output layers are taken if they have as many classes. Raises UserError for an
    unreadable file, and when nothing fits.
    """
    stored = read_weights(path)
    own = model.state_dict()
    rows = _class_rows(model, stored.names)
    taken, partly, skipped = [], [], {}
    for name, target in own.items():
        source = stored.tensors.get(name)
        layer, _, _ = name.rpartition(".")
        if layer in rows:  # a bias without its weight would be worse than none
            leaves = (f"{layer}.weight", f"{layer}.bias")
            reason = next(filter(None, (rows[layer].misfit(own[n], stored.tensors.get(n)) for n in leaves)), "")
        elif source is None:
            reason = "not in the file"
        else:
            same = source.shape == target.shape
            reason = "" if same else f"shape {list(target.shape)} here, {list(source.shape)} there"
        if reason:
            skipped[name] = reason
        elif layer in rows and not rows[layer].is_identity:
            rows[layer].copy(target, source)
            partly.append(name)
        else:
            target.copy_(source)
            taken.append(name)
    if all(name.endswith(COUNTERS) for name in [*taken, *partly]):
        raise UserError(f"{path}: no tensor fits this model; is it of another family or size?")
    unused = tuple(name for name in stored.tensors if name not in own)
    used = [rows[layer] for layer in rows if f"{layer}.weight" not in skipped]
    classes = tuple(model.names[i] for i, _ in used[0].pairs) if used else ()
    return TransferReport(str(path), tuple(taken), tuple(partly), skipped, unused, classes)


def _class_rows(model: Detector, names: Sequence[str] | None) -> dict[str, _ClassRows]:
    """By name of the output layer; empty when the file names no classes."""
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
