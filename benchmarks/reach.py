"""Counts the modules of Lockstep that plain commands have imported when they end, and their lines, blank ones left out.

    python -m benchmarks.reach             # by folder
    python -m benchmarks.reach --modules   # by module

A plain training (``train.py --noplots``), a validation (``val.py --noplots``) and a detection on one image run in this
process with a tiny model and data set. tests/test_architecture.py holds the counts.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.helpers.tiny import write_dataset, write_model

ROOT = Path(__file__).parents[1]
OURS = ("utils", "data", "models", "engine", "tools", "lockstep", "train", "val", "detect")
SMALL = ("--imgsz", "64", "--device", "cpu", "--noplots")
ALONE = ("--workers", "0", "--amp", "off", "--batch-size", "4")


def lines_of(module: str) -> int:
    text = Path(sys.modules[module].__file__).read_text(encoding="utf-8")
    return sum(1 for line in text.splitlines() if line.strip())


def loaded(script: str, *argv: str) -> dict[str, int]:
    """Our modules that ``script`` has imported when it ends, with their lines. It forgets those loaded before."""
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    importlib.import_module(script).main(argv)
    return {name: lines_of(name) for name in sorted(sys.modules) if name.partition(".")[0] in OURS}


def count_all(folder: Path) -> dict[str, dict[str, int]]:
    """The modules of each plain command, run in ``folder``."""
    data, model = str(write_dataset(folder / "set", train=6, val=3)), str(write_model(folder / "tiny.yaml"))
    project = ("--project", str(folder), *SMALL)
    best, image = str(folder / "run" / "best.pt"), str(folder / "set" / "images" / "val" / "000.png")
    return {
        "train": loaded("train", "--data", data, "--model", model, "--epochs", "1", "--name", "run", *ALONE, *project),
        "val": loaded("val", "--data", data, "--weights", best, "--name", "val", "--workers", "0", *project),
        "detect": loaded("detect", "--weights", best, "--source", image, "--name", "detect", *project[:-1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.reach", description=__doc__.split("\n")[0])
    parser.add_argument("--modules", action="store_true", help="list each module")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        counts = count_all(Path(folder))
    for script, modules in counts.items():
        print(f"{script}: {len(modules)} modules, {sum(modules.values())} lines")
        lines, number = Counter(), Counter()
        for name, count in modules.items():
            key = name if options.modules else ".".join(name.split(".")[:2])
            lines[key] += count
            number[key] += 1
        for key, count in sorted(lines.items()):
            print(f"    {key:40}{number[key]:4}{count:7}")


if __name__ == "__main__":
    main()
