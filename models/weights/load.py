"""Detectors from checkpoint files, ours and public ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.detector import Detector, build_detector
from models.weights.identify import names_for, recognise
from models.weights.read import StoredWeights, read_weights, shapes_of
from utils.errors import UserError, errors_of


def load_detector(path: str | Path) -> tuple[Detector, dict[str, Any]]:
    """A detector in eval mode, float32 on the CPU, and its checkpoint's content.

    EMA weights are preferred. A foreign file is recognised by its tensors; its content has only ``format`` ("foreign"),
    ``names`` and ``imgsz``. Raises UserError for a file that is missing, damaged, not a checkpoint, or of an unknown
    model.
    """
    stored = read_weights(path)
    detector = detector_of(stored)
    return detector, stored.content | {"names": list(detector.names)}


def detector_of(stored: StoredWeights) -> Detector:
    """The detector with the stored weights, in eval mode. Raises UserError as `load_detector` does."""
    if stored.is_ours:
        names = stored.names or ()
        with errors_of(stored.path):
            detector = build_detector(stored.content["model_spec"], len(names), names=names)
    else:
        spec, num_classes = recognise(stored)
        names = names_for(num_classes, stored.names, stored.path)
        detector = build_detector(spec.plain, num_classes, names=names)
    if problem := _misfit(detector, stored):
        raise UserError(f"{stored.path}: its weights do not fit its model ({problem})")
    try:
        detector.load_state_dict(stored.tensors, strict=False)  # names were checked; counters may be missing
    except RuntimeError as error:  # a counter with a wrong shape
        reason = str(error).splitlines()[-1].strip()
        raise UserError(f"{stored.path}: its weights do not fit its model ({reason})") from None
    return detector.eval()


def _misfit(detector: Detector, stored: StoredWeights) -> str:
    """The first difference in names, shapes or strides; empty if there is none."""
    wanted, found = shapes_of(detector.state_dict()), stored.shapes
    for name in [*wanted, *found]:
        if wanted.get(name) != found.get(name):
            wants, has = (str(list(s[name])) if name in s else "nothing" for s in (wanted, found))
            return f"{name}: the model has {wants}, the file {has}"
    if stored.strides not in (None, detector.strides):
        return f"strides: the model has {list(detector.strides)}, the file {list(stored.strides)}"
    return ""
