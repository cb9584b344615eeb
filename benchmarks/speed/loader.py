"""Training images per second with mosaic, affine, color and flip augmentation, compared with Ultralytics.

    python -m benchmarks.speed.loader --data coco128.yaml --imgsz 640 320 --cache none ram --peer PYTHON

Both loaders stay alive and alternate, with the same number of workers. The settings reported by the peer must equal
`configs/hyp/scratch.yaml` with the changes of ``--set``, so most of these can be compared only without a peer.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.command import parse_flags, positive, run_benchmark
from benchmarks.dataset_copy import copied
from benchmarks.speed.compare import PEER, Comparison, Sides, our_command, peer_command, show
from utils.config.recipes import hyperparameters_from


def main() -> None:
    options = parse_flags(
        "speed.loader",
        __doc__,
        data={},
        imgsz={"nargs": "+", "default": [640, 320]},
        cache={"nargs": "+", "default": ["none", "ram"], "choices": ("none", "ram", "disk"), "help": "of both sides"},
        batch_size={},
        workers={},
        seconds={"type": positive, "default": 6, "help": "length of a turn"},
        set={"nargs": "*", "default": [], "help": "hyper-parameters of our side, key=value"},
        rounds={},
        peer={},
    )
    with copied(options.data) as data:
        rows = [compare(options, data, cache, size) for cache in options.cache for size in options.imgsz]
    title = f"Loader, {Path(options.data).stem}, batch {options.batch_size}, {options.workers} workers"
    show(", ".join([title, *options.set]), rows)


def compare(options: argparse.Namespace, data: Path, cache: str, size: int) -> Comparison:
    """Lets both loaders measure alternately. Raises SystemExit if one fails."""
    shared = {"data": data, "imgsz": size, "batch_size": options.batch_size, "workers": options.workers}
    shared |= {"cache": cache, "seconds": options.seconds}
    commands = {"ours": our_command("loader", **shared, cache_dir=data.parent / "index", override=options.set)}
    if options.peer:
        commands[PEER] = peer_command(options.peer, "loader", **shared)
    with Sides(commands) as sides:
        results = sides.alternate(options.rounds)
    for result in itertools.chain(*results.values()):
        if "error" in result:
            sys.exit(result["error"])
    if options.peer:
        check_equal_augmentation(results[PEER][0]["settings"], options.set)
    rates = {name: [result["rate"] for result in side_results] for name, side_results in results.items()}
    return Comparison(
        f"{size} px, cache {cache}", "images/s", rates["ours"], rates.get(PEER, []), higher_is_better=True
    )


def check_equal_augmentation(peer_settings: dict[str, float], override: Sequence[str]) -> None:
    """Raises SystemExit if the peer augments with other settings than our side, whose ``--set`` is ``override``."""
    ours = asdict(hyperparameters_from("", list(override)))
    differing = {name: (ours[name], value) for name, value in peer_settings.items() if ours[name] != value}
    if differing:
        sys.exit(f"the augmentation settings differ: {differing}")


if __name__ == "__main__":
    run_benchmark(main)
