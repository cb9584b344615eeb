"""Lists the public weights, shows the contents of a checkpoint file, or converts it.

python -m tools.weights list
python -m tools.weights show yolov8n.pt
python -m tools.weights convert yolov8n.pt yolov8n.safetensors
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from models.detector import Detector
from models.weights.download import fetch_weights, known_weights
from models.weights.load import detector_of
from models.weights.read import COUNTERS, METADATA_KEY, read_weights
from utils import program
from utils.config.flags import parser_of
from utils.distributed.context import DistributedContext
from utils.entrypoint import run_main
from utils.errors import UserError
from utils.files.checkpoint import VERSION, write_checkpoint, write_safetensors
from utils.logger import configure_logging, get_logger
from utils.strings import aligned, counted

# Keys of our checkpoints that are written anew, and those of a run, which are not converted.
NOT_COPIED = (
    *("format", "version", "program", "model", "ema"),
    *("optimizer", "scaler", "progress", "run", "config", "rank_buffers"),
)


def convert(source: str | Path, target: str | Path) -> str:
    """Writes the weights of a checkpoint file to another: safetensors or, with the suffix .pt, our own checkpoint.

    Both contain float32 weights and what rebuilds the detector, but not the state of a run. Weights of an unknown model
    are written to safetensors under their names. Returns a line that says what was written.
    """
    source, target = Path(source), Path(target)
    if target.suffix not in (".safetensors", ".pt"):
        raise UserError(f"{target}: must end in .safetensors or .pt")
    stored = read_weights(source)
    if target.exists() and target.samefile(source):
        raise UserError(f"{target}: source and target are the same file")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        detector = detector_of(stored)
    except UserError as error:
        if stored.is_ours or target.suffix == ".pt":
            raise
        write_safetensors(target, stored.tensors, {"format": "pt"})
        return f"{error}; {counted(len(stored.tensors), 'tensor')} written to {target} under their names"
    kept = {key: value for key, value in stored.content.items() if key not in NOT_COPIED}
    description = kept | {"model_spec": detector.spec, "names": list(detector.names)}
    weights = {name: tensor for name, tensor in detector.state_dict().items() if not name.endswith(COUNTERS)}
    if target.suffix == ".pt":
        write_checkpoint({**description, "model": {}, "ema": detector.state_dict()}, target)
    else:
        text = json.dumps({"version": VERSION, "program": program.VERSION, **description}, ensure_ascii=False)
        write_safetensors(target, weights, {"format": "pt", METADATA_KEY: text})
    return f"{describe(detector, source)} -> {target}"


def describe(detector: Detector, source: str | Path) -> str:
    """One line about a checkpoint's model."""
    count = sum(p.numel() for p in detector.parameters())
    line = f"{source}: {detector.spec['name']}, {count:,} parameters, {counted(detector.num_classes, 'class')}"
    return f"{line}, strides {', '.join(map(str, detector.strides))}"


def _show(path: Path) -> None:
    stored = read_weights(path)
    detector = detector_of(stored)
    log = get_logger()
    log.info("%s", describe(detector, path))
    log.info("classes: %s", ", ".join(detector.names))
    log.info("image size: %d", stored.content["imgsz"])
    if "program" in stored.content:
        log.info("written by Lockstep %s", stored.content["program"])
    if detector.head.anchors is not None:
        for stride, level in zip(detector.strides, detector.head.anchors.tolist()):
            pairs = ", ".join(f"{w * stride:g} x {h * stride:g}" for w, h in level)
            log.info("anchors of stride %d, pixels: %s", stride, pairs)


def _list() -> None:
    rows = [("name", "license", "file, MB", "AP")]
    for name, entry in known_weights().items():
        rows.append((name, entry.license, f"{entry.size / 1e6:.1f}" if entry.size else "-", f"{entry.ap:.1f}"))
    for line in aligned(rows, left=True):
        get_logger().info("%s", line)
    get_logger().info("AP: AP50-95 on COCO val2017 in percent, as published. -: not known")


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("weights", "Lists public weights, shows and converts checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list the public weights with their licenses, permissive ones first")
    show = commands.add_parser("show", help="show the contents of a checkpoint")
    to_file = commands.add_parser("convert", help="write its weights to another file")
    for command in (show, to_file):
        command.add_argument("source", help="checkpoint, or a name from configs/weights.yaml")
        command.add_argument("--offline", action="store_true", help="never download weights")
    to_file.add_argument("target", help="file to write: .safetensors, or .pt for our own format")
    given = parser.parse_args(argv)
    configure_logging(True)
    if given.command == "list":
        _list()
        return
    path = fetch_weights(given.source, ctx=DistributedContext.single(), offline=given.offline)
    if given.command == "convert":
        get_logger().info("%s", convert(path, given.target))
    else:
        _show(path)


if __name__ == "__main__":
    run_main(main)
