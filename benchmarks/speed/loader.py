"""Training images per second with mosaic, affine, color and flips, compared with Ultralytics.

    python -m benchmarks.speed.loader --data coco128.yaml --imgsz 640 320 --cache none ram --peer PYTHON

Both loaders stay alive and alternate, with the same number of workers. The peer's settings are read from it and must be
those of `configs/hyp/scratch.yaml`; a second table compares statistics of the images of both.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.speed.dataset_copy import copied
from benchmarks.speed.report import Comparison, add_flags, show
from benchmarks.speed.turns import PEER_SIDE, alternate

GOALS = {("none", 640): 2.0, ("none", 320): 1.5, ("ram", 640): 3.0, ("ram", 320): 2.0}
# How far the pictures may differ: as a share of the peer's value, or, of what is a share already, as a difference. Each
# is a few standard errors of what is looked at.
ALIKE_RELATIVE = {"boxes a picture": 0.15, "box side, share of the picture": 0.15}
ALIKE_ABSOLUTE = {"padding": 0.04, "brightness": 0.04, "saturation": 0.04}


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.speed.loader", description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", required=True, help="data set YAML, of a format that both read")
    parser.add_argument("--imgsz", type=int, nargs="+", default=[640, 320])
    parser.add_argument("--cache", nargs="+", default=["none", "ram"], choices=("none", "ram", "disk"))
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6.0, help="a turn")
    parser.add_argument("--set", nargs="*", default=[], dest="override", help="hyper-parameters of ours, key=value")
    add_flags(parser)
    options = parser.parse_args()
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
        check_strength(results["ours"][0], results["peer"][0], cache, size)
    rates = {name: [r["rate"] for r in values] for name, values in results.items()}
    return Comparison(
        f"{size} px, cache {cache}", "images/s", rates["ours"], rates.get("peer", []), True, GOALS.get((cache, size))
    )


def check_strength(ours: dict, peer: dict, cache: str, size: int) -> None:
    """Raises SystemExit if the peer augments with other settings, or if its printed image statistics differ."""
    from dataclasses import asdict

    from utils.config.parser import hyperparameters_from

    own = asdict(hyperparameters_from(""))
    differing = {name: (own[name], value) for name, value in peer["settings"].items() if own[name] != value}
    if differing:
        sys.exit(f"the two do not augment alike: {differing}")
    keys = [key for key in peer if isinstance(peer[key], float) and key != "rate"]
    print(f"\n{size} px, cache {cache}: pictures of ours / peer's")
    for key in keys:
        print(f"  {key:40} {ours[key]:8.4f} {peer[key]:8.4f}")
    apart = differences(ours, peer)
    sys.stdout.flush()
    if apart:
        sys.exit(f"{size} px, cache {cache}: the pictures do not look alike in {', '.join(apart)}")


def differences(ours: dict[str, float], peer: dict[str, float]) -> list[str]:
    """The statistics in which the images of both sides differ by more than chance."""
    relative = [key for key, most in ALIKE_RELATIVE.items() if abs(ours[key] / peer[key] - 1) > most]
    return relative + [key for key, most in ALIKE_ABSOLUTE.items() if abs(ours[key] - peer[key]) > most]


if __name__ == "__main__":
    main()
