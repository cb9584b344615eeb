"""Accuracy of declared variants on several data sets and seeds, compared with a peer. No epoch is selected.

    python -m benchmarks.accuracy run variants.yaml --out FOLDER --data a.yaml b.yaml --seeds 0 1 --weights-dir DIR \
        --peer PYTHON
    python -m benchmarks.accuracy show variants.yaml --out FOLDER --data a.yaml b.yaml --base NAME

``run`` trains the missing runs, each on one thread, and scores each last.pt with pycocotools, ours also without box
voting; it can be stopped and started again. A variant that is changed after its runs needs another name. ``show``
prints the APs and the differences of all variants from ``--base``.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
from pathlib import Path

from benchmarks.accuracy.runs import VariantRun, copy_data, scored_of, stored_result, train_and_score
from benchmarks.accuracy.summary import read_runs, table
from benchmarks.accuracy.variants import Variant, read_variants
from benchmarks.coco_scores import require_pycocotools
from benchmarks.command import parse_flags, positive, run_benchmark
from data.open import find_data
from utils.errors import UserError


def main() -> None:
    options = parse_flags(
        "accuracy",
        __doc__,
        {
            "action": {"choices": ("run", "show"), "help": "train the missing runs, or print the results"},
            "variants": {"type": Path, "help": "YAML that declares the variants"},
        },
        out={"type": Path, "required": True, "help": "folder of runs and results"},
        data={"nargs": "+", "help": "data sets with YOLO labels: YAMLs, folders, or names in configs/data"},
        only={"nargs": "*", "default": [], "help": "names of variants in the file; default: all"},
        seeds={"type": int, "nargs": "+", "help": "default: 0 1 for run, all that have ended for show"},
        weights_dir={"type": Path, "default": Path("."), "help": "folder of the starting weights"},
        peer={},
        base={"default": "", "help": "variant that the others are compared with; default: the first"},
        draws={"type": positive, "default": 1000, "help": "number of bootstrap draws"},
    )
    options.out = options.out.resolve()
    sources = [Path(find_data(data)) for data in options.data]
    if len({source.stem for source in sources}) < len(sources):
        raise UserError("--data: files with the same name would share a folder of runs; rename one")
    declared = read_variants(options.variants)
    base = options.base.removesuffix(" without voting") if options.action == "show" else ""
    names = [*(options.only or declared), *([base] if base else [])]
    unknown = [name for name in names if name not in declared]
    if unknown:
        raise UserError(f"{options.variants}: no variant {', '.join(unknown)}, only {', '.join(declared)}")
    variants = [declared[name] for name in dict.fromkeys(names)]
    {"run": train, "show": show}[options.action](variants, sources, options)


def train(variants: list[Variant], sources: list[Path], options: argparse.Namespace) -> None:
    """Trains seed by seed, so that a stopped comparison has all variants at the same number of seeds.

    Raises UserError for mistakes that can be found before training.
    """
    weights = {
        variant.name: (options.weights_dir / variant.weights).resolve() for variant in variants if variant.weights
    }
    for name, path in weights.items():
        if not path.is_file():
            raise UserError(f"{name}: {path}: no such file; correct --weights-dir")
    if not options.peer and any(variant.peer for variant in variants):
        raise UserError("--peer is required for the variants of a peer")
    require_pycocotools()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which ends the running command too
    runs = []
    copies = {}
    for seed, source, variant in itertools.product(dict.fromkeys(options.seeds or (0, 1)), sources, variants):
        folder = options.out / variant.name / source.stem / str(seed)
        if stored_result(folder, variant) is None:
            key = source, variant.subset
            copies[key] = copies.get(key) or copy_data(source, options.out, variant.subset)
            runs.append(VariantRun(variant, copies[key], seed, folder, weights.get(variant.name), options.peer))
    for run in runs:
        result = train_and_score(run)
        scores = ", ".join(f"{split} {result[split]:.4f}" for split in run.data.gt)
        print(f"{run.folder.relative_to(options.out)}: {scores}, {result['train_cpu_s']:.0f} s", flush=True)


def show(variants: list[Variant], sources: list[Path], options: argparse.Namespace) -> None:
    copies = [copy_data(source, options.out) for source in sources]
    runs: dict[str, dict] = {}
    for variant in variants:
        for suffix, data in itertools.product(scored_of(variant), copies):
            folder = options.out / variant.name / data.name
            found = read_runs(folder, variant, data, draws=options.draws, seeds=options.seeds or (), suffix=suffix)
            if found is not None:
                runs.setdefault(f"{variant.name}{suffix}", {})[data.name] = found
    if not runs:
        raise UserError(f"{options.out}: no run has ended yet")
    if options.base and options.base not in runs:
        raise UserError(f"{options.base}: no run has ended yet; choose another --base")
    print(table(options.base or next(iter(runs)), runs))


if __name__ == "__main__":
    run_benchmark(main)
