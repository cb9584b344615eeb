"""Accuracy of declared variants on several data sets and seeds, compared with a peer.

    python -m benchmarks.accuracy run variants.yaml --out FOLDER --data a.yaml b.yaml --seeds 0 1 --weights-dir DIR \
        --peer PYTHON
    python -m benchmarks.accuracy show variants.yaml --out FOLDER --data a.yaml b.yaml --base NAME

``run`` trains what is missing, each run on one thread, and scores its last.pt with pycocotools; it may be stopped and
started again. ``show`` prints the APs and the differences of all variants from ``--base``.
"""

from __future__ import annotations

import argparse
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.accuracy.runs import Bench, DataCopy, add_tree, copy_data, is_done, run
from benchmarks.accuracy.summary import read_runs, table
from benchmarks.accuracy.variants import Variant, read_variants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=("run", "show"))
    parser.add_argument("variants", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of runs and results")
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--only", nargs="*", default=[], help="variants of the file; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--weights-dir", type=Path, default=Path("."))
    parser.add_argument("--peer", default="", help="Python of an environment that has Ultralytics and pycocotools")
    parser.add_argument("--base", default="", help="variant that the others are compared with; default: the first")
    parser.add_argument("--draws", type=int, default=1000)
    args = parser.parse_args()
    variants = read_variants(args.variants)
    if unknown := [name for name in [*args.only, *([args.base] if args.base else [])] if name not in variants]:
        parser.error(f"{args.variants} has no variant {', '.join(unknown)}")
    chosen = [variants[name] for name in args.only or variants]
    bench = Bench(args.out.resolve(), args.weights_dir.resolve(), args.peer)
    if args.action == "run":
        if not args.peer and any(variant.peer for variant in chosen):
            parser.error("--peer is needed for the variants of a peer")
        train(bench, chosen, args)
    else:
        show(bench, chosen, args)


def train(bench: Bench, variants: list[Variant], args: argparse.Namespace) -> None:
    """Seed by seed, so that a stopped comparison has all variants at the same number of seeds."""

    def one(seed: int, source: Path, variant: Variant) -> None:
        folder = bench.folder(variant, source.stem, seed)
        result = run(bench, variant, copies[source, variant.subset], seed)
        scores = ", ".join(f"{name} {value:.4f}" for name, value in result.items() if name in ("val", "test"))
        print(f"{folder.relative_to(bench.out)}: {scores}, {result['train_cpu_s']:.0f} s", flush=True)

    copies = {(s, v.subset): data_copy(bench, s, v.subset) for s, v in itertools.product(args.data, variants)}
    for variant in variants:
        add_tree(bench, variant)
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = [
            pool.submit(one, seed, source, variant)
            for seed, source, variant in itertools.product(args.seeds, args.data, variants)
            if not is_done(bench.folder(variant, source.stem, seed))
        ]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def data_copy(bench: Bench, source: Path, subset: int = 0) -> DataCopy:
    return copy_data(source, bench.out / "data" / (f"{source.stem}-{subset}" if subset else source.stem), subset)


def show(bench: Bench, variants: list[Variant], args: argparse.Namespace) -> None:
    copies = [data_copy(bench, source) for source in args.data]
    runs: dict[str, dict] = {}
    for variant, data in itertools.product(variants, copies):
        if found := read_runs(bench.out / variant.name / data.name, data, args.draws):
            runs.setdefault(variant.name, {})[data.name] = found
    if not runs:
        raise SystemExit(f"{bench.out}: no run has ended yet")
    print(table(args.base or next(iter(runs)), runs))


if __name__ == "__main__":
    main()
