"""Detectors from checkpoint files, ours and public ones; and the command that shows and converts such files.

python -m models.pretrained show yolov8n.pt
python -m models.pretrained convert yolov8n.pt yolov8n.safetensors
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.class_names import names_for
from models.detector import Detector, build_detector
from models.recognition import recognise
from models.stored_weights import COUNTERS, METADATA_KEY, StoredWeights, read_weights, shapes_of
from utils.checkpoint_file import VERSION, write_checkpoint
from utils.cli import run_main
from utils.distributed import DistributedContext
from utils.downloads import fetch_weights
from utils.errors import UserError, errors_of
from utils.logger import configure_logging, get_logger
from utils.safetensors_file import write_safetensors

NOT_DESCRIPTION = ("format", "version", "model", "ema")  # of our checkpoints; written anew
OF_A_RUN = ("optimizer", "scaler", "progress", "run", "config", "rank_buffers")  # not kept: weights only are converted


def load_detector(path: str | Path) -> tuple[Detector, dict[str, Any]]:
    """A detector in eval mode, float32 on the CPU, and its checkpoint's content.

    Of our checkpoints the EMA weights are taken if there are any. A foreign file is recognised by its tensors; the
    content then holds ``format`` ("foreign"), ``names`` and ``imgsz`` alone. Raises UserError for a file that is
    missing, damaged, not a checkpoint, or of no known model.
    """
    stored = read_weights(path)
    detector = detector_of(stored)
    return detector, stored.content | {"names": list(detector.names)}


def detector_of(stored: StoredWeights) -> Detector:
    """The detector whose weights were read, in eval mode. Raises UserError as `load_detector` does."""
    if stored.is_ours:
        names = stored.names or ()
        with errors_of(stored.path):
            detector = build_detector(stored.content["model_spec"], len(names), names=names)
    else:
        spec, num_classes = recognise(stored)
        names = names_for(num_classes, stored.names, stored.path)
        detector = build_detector(spec.plain, num_classes, names=names)
    problem = _misfit(detector, stored)
    if problem:
        raise UserError(f"{stored.path}: its weights do not fit its model ({problem})")
    try:
        detector.load_state_dict(stored.tensors, strict=False)  # strict, but for the counters
    except RuntimeError as error:  # a counter that is none
        reason = str(error).splitlines()[-1].strip()
        raise UserError(f"{stored.path}: its weights do not fit its model ({reason})") from None
    return detector.eval()


def _misfit(detector: Detector, stored: StoredWeights) -> str:
    """The first difference in names, shapes or strides, or nothing."""
    wanted, found = shapes_of(detector.state_dict()), stored.shapes
    for name in [*wanted, *found]:
        if wanted.get(name) != found.get(name):
            wants, has = (str(list(s[name])) if name in s else "nothing" for s in (wanted, found))
            return f"{name}: the model has {wants}, the file {has}"
    if stored.strides not in (None, detector.strides):
        return f"strides: the model has {list(detector.strides)}, the file {list(stored.strides)}"
    return ""


def convert(source: str | Path, target: str | Path) -> str:
    """Writes the weights of one checkpoint file as another: safetensors or, with the suffix .pt, our own checkpoint.

    Both hold float32 weights and what rebuilds the detector; of a run's checkpoint, not the state of the run. Weights
    of no model known here are written to safetensors as they are. Returns a line that says what was written.
    """
    source, target = Path(source), Path(target)
    if target.suffix not in (".safetensors", ".pt"):
        raise UserError(f"{target}: wants a name that ends in .safetensors or .pt")
    stored = read_weights(source)
    if target.exists() and target.samefile(source):
        raise UserError(f"{target}: is the file that is to be read")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        detector = detector_of(stored)
    except UserError as error:
        if stored.is_ours or target.suffix == ".pt":
            raise
        write_safetensors(target, stored.tensors, {"format": "pt"})
        return f"{error}; {len(stored.tensors)} tensors written to {target} under the names they have"
    kept = {key: value for key, value in stored.content.items() if key not in (*NOT_DESCRIPTION, *OF_A_RUN)}
    description = kept | {"model_spec": detector.spec, "names": list(detector.names)}
    weights = {name: tensor for name, tensor in detector.state_dict().items() if not name.endswith(COUNTERS)}
    if target.suffix == ".pt":
        write_checkpoint({**description, "model": {}, "ema": detector.state_dict()}, target)
    else:
        text = json.dumps({"version": VERSION, **description}, ensure_ascii=False)
        write_safetensors(target, weights, {"format": "pt", METADATA_KEY: text})
    return f"{describe(detector, source)} -> {target}"


def describe(detector: Detector, source: str | Path) -> str:
    """What a checkpoint holds, in a line."""
    count = sum(p.numel() for p in detector.parameters())
    line = f"{source}: {detector.spec['name']}, {count:,} parameters, {detector.num_classes} classes"
    return f"{line}, strides {', '.join(map(str, detector.strides))}"


def _show(path: Path) -> None:
    stored = read_weights(path)
    detector = detector_of(stored)
    log = get_logger()
    log.info("%s", describe(detector, path))
    log.info("classes: %s", ", ".join(detector.names))
    log.info("image size: %d", stored.content["imgsz"])
    if detector.anchors is not None:
        for stride, level in zip(detector.strides, detector.anchors.tolist()):
            pairs = ", ".join(f"{w * stride:g} x {h * stride:g}" for w, h in level)
            log.info("anchors of stride %d, pixels: %s", stride, pairs)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m models.pretrained", description="Shows and converts checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in (("show", "what a checkpoint holds"), ("convert", "write its weights as another file")):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("source", help="checkpoint, or a name in configs/weights.yaml")
        command.add_argument("--offline", action="store_true", help="never download weights")
        if name == "convert":
            command.add_argument("target", help="file to write: .safetensors, or .pt for a checkpoint of ours")
    given = parser.parse_args(argv)
    configure_logging(True)
    path = fetch_weights(given.source, ctx=DistributedContext.single(), offline=given.offline)
    if given.command == "convert":
        get_logger().info("%s", convert(path, given.target))
    else:
        _show(path)


if __name__ == "__main__":
    run_main(main)
