"""Accuracy of declared variants on several data sets and seeds, compared with a peer. No epoch is selected.

    python -m benchmarks.accuracy run variants.yaml --out FOLDER --data a.yaml b.yaml --seeds 0 1 --weights-dir DIR \
        --peer PYTHON
    python -m benchmarks.accuracy show variants.yaml --out FOLDER --data a.yaml b.yaml --base NAME

``run`` trains the missing runs, each on one thread, and scores each last.pt with pycocotools; it can be stopped and
started again. A variant that is changed after its runs needs another name. ``show`` prints the APs and the differences
of all variants from ``--base``.
"""

from __future__ import annotations

import argparse
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.accuracy.runs import VariantRun, Workspace, end_on_signals, prepare, stored_result, train_and_score
from benchmarks.accuracy.summary import read_runs, table
from benchmarks.accuracy.variants import Variant, read_variants
from benchmarks.coco_scores import require_pycocotools
from benchmarks.entrypoint import run_benchmark
from benchmarks.peer import add_peer_flag, find_peer
from data.open import find_data
from utils.errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.accuracy", description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=("run", "show"), help="train the missing runs, or print the results")
    parser.add_argument("variants", type=Path, help="YAML that declares the variants")
    parser.add_argument("--out", type=Path, required=True, help="folder of runs and results")
    parser.add_argument("--data", nargs="+", required=True, help="data sets: YAMLs, folders, or names in configs/data")
    parser.add_argument("--only", nargs="*", default=[], help="names of variants in the file; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 1 for run, all that have ended for show")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--weights-dir", type=Path, default=Path("."), help="folder of the starting weights")
    add_peer_flag(parser)
    parser.add_argument("--base", default="", help="variant that the others are compared with; default: the first")
    parser.add_argument("--draws", type=int, default=1000, help="number of bootstrap draws, at least 100")
    args = parser.parse_args()
    if args.jobs < 1 or args.draws < 100:
        raise UserError("--jobs must be at least 1, and --draws at least 100")
    sources = [Path(find_data(data)) for data in args.data]
    if len({source.stem for source in sources}) < len(sources):
        raise UserError("--data: files with the same name would share a folder of runs; rename one")
    workspace = Workspace(args.out.resolve(), args.weights_dir.resolve(), find_peer(args.peer))
    variants = chosen_variants(args)
    if args.action == "run":
        train(workspace, variants, sources, args)
    else:
        show(workspace, variants, sources, args)


def chosen_variants(args: argparse.Namespace) -> list[Variant]:
    """Returns the variants of ``--only``, for ``show`` also that of ``--base``. Raises UserError for unknown names."""
    variants = read_variants(args.variants)
    base = [args.base] if args.base else []
    unknown = [name for name in [*args.only, *base] if name not in variants]
    if unknown:
        raise UserError(f"{args.variants}: no variant {', '.join(unknown)}, only {', '.join(variants)}")
    names = args.only or list(variants)
    if args.action == "show":
        names = [*names, *base]
    return [variants[name] for name in dict.fromkeys(names)]


def train(workspace: Workspace, variants: list[Variant], sources: list[Path], args: argparse.Namespace) -> None:
    """Trains seed by seed, so that a stopped comparison has all variants at the same number of seeds.

    Raises UserError for mistakes that can be found before training.
    """
    if not workspace.peer and any(variant.peer for variant in variants):
        raise UserError("--peer is required for the variants of a peer")
    require_pycocotools()
    missing = [
        (seed, source, variant)
        for seed, source, variant in itertools.product(dict.fromkeys(args.seeds or (0, 1)), sources, variants)
        if stored_result(workspace.folder(variant, source.stem, seed), variant) is None
    ]
    needed_copies = dict.fromkeys((source, variant.subset) for _, source, variant in missing)
    copies = {(source, subset): workspace.copy_data(source, subset) for source, subset in needed_copies}
    runs = [VariantRun(workspace, variant, copies[source, variant.subset], seed) for seed, source, variant in missing]
    for variant in variants:
        prepare(workspace, variant)
    end_on_signals()
    with ThreadPoolExecutor(args.jobs) as pool:
        try:
            for future in [pool.submit(train_and_show, run) for run in runs]:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def train_and_show(run: VariantRun) -> None:
    result = train_and_score(run)
    scores = ", ".join(f"{name} {value:.4f}" for name, value in result.items() if name in ("val", "test"))
    print(f"{run.folder.relative_to(run.workspace.out)}: {scores}, {result['train_cpu_s']:.0f} s", flush=True)


def show(workspace: Workspace, variants: list[Variant], sources: list[Path], args: argparse.Namespace) -> None:
    copies = [workspace.copy_data(source) for source in sources]
    runs: dict[str, dict] = {}
    for variant, data in itertools.product(variants, copies):
        folder = workspace.out / variant.name / data.name
        variant_runs = read_runs(folder, variant, data, draws=args.draws, seeds=args.seeds or ())
        if variant_runs is not None:
            runs.setdefault(variant.name, {})[data.name] = variant_runs
    if not runs:
        raise UserError(f"{workspace.out}: no run has ended yet")
    if args.base and args.base not in runs:
        raise UserError(f"{args.base}: no run has ended yet; choose another --base")
    print(table(args.base or next(iter(runs)), runs))


if __name__ == "__main__":
    run_benchmark(main)
