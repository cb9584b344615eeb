"""Training images per second with mosaic, affine, color and flip augmentation, compared with Ultralytics.

    python -m benchmarks.speed.loader --data coco128.yaml --imgsz 640 320 --cache none ram --peer PYTHON

Both loaders stay alive and alternate, with the same number of workers. The settings reported by the peer must equal
`configs/hyp/scratch.yaml` with the changes of ``--set``, so most of these can be compared only without a peer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.dataset_copy import copied
from benchmarks.entrypoint import run_benchmark
from benchmarks.flag_types import at_least, image_size, seconds
from benchmarks.peer import PEER_SIDE, find_peer
from benchmarks.speed.report import Comparison, add_flags, show
from benchmarks.speed.sides import alternate
from utils.config.recipes import hyperparameters_from


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.speed.loader", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--data", required=True, help="data set with YOLO labels: YAML, folder, or name in configs/data"
    )
    parser.add_argument("--imgsz", type=image_size, nargs="+", default=[640, 320], help="pixels")
    parser.add_argument(
        "--cache", nargs="+", default=["none", "ram"], choices=("none", "ram", "disk"), help="cache of both sides"
    )
    parser.add_argument("--batch-size", type=at_least(1), default=16, help="images per batch")
    parser.add_argument("--workers", type=at_least(0), default=2, help="worker processes of each side")
    parser.add_argument("--seconds", type=seconds, default=6.0, help="length of a turn")
    parser.add_argument("--set", nargs="*", default=[], dest="override", help="hyper-parameters of our side, key=value")
    add_flags(parser)
    options = parser.parse_args()
    options.peer = find_peer(options.peer)
    with copied(options.data) as data:
        rows = [compare(options, str(data), cache, size) for cache in options.cache for size in options.imgsz]
    title = f"Loader, {Path(options.data).stem}, batch {options.batch_size}, {options.workers} workers"
    title += "".join(f", {setting}" for setting in options.override)
    show(title, rows)


def compare(options: argparse.Namespace, data: str, cache: str, size: int) -> Comparison:
    shared = ["loader", "--data", data, "--imgsz", str(size), "--batch-size", str(options.batch_size)]
    shared += ["--workers", str(options.workers), "--cache", cache, "--seconds", str(options.seconds)]
    index = str(Path(data).parent / "index")
    commands = {"ours": [sys.executable, "-m", "benchmarks.speed.our_side", *shared, "--cache-dir", index]}
    commands["ours"] += ["--set", *options.override]
    if options.peer:
        commands["peer"] = [options.peer, str(PEER_SIDE), *shared]
    results = alternate(commands, options.rounds)
    if options.peer:
        check_equal_augmentation(results["peer"][0]["settings"], options.override)
    rates = {name: [result["rate"] for result in side_results] for name, side_results in results.items()}
    label = f"{size} px, cache {cache}"
    return Comparison(label, "images/s", rates["ours"], rates.get("peer", []), higher_is_better=True)


def check_equal_augmentation(peer_settings: dict[str, float], override: Sequence[str]) -> None:
    """Raises SystemExit if the peer augments with other settings than our side, whose ``--set`` is ``override``."""
    ours = asdict(hyperparameters_from("", list(override)))
    differing = {name: (ours[name], value) for name, value in peer_settings.items() if ours[name] != value}
    if differing:
        sys.exit(f"the augmentation settings differ: {differing}")


if __name__ == "__main__":
    run_benchmark(main)
