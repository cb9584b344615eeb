"""Proves that the number of processes does not change a single digit of a validation, and that few images cause no
hang.

    python -m benchmarks.sharded_validation --data bccd.yaml --weights best.pt

Takes the first 0, 1, 7, 8, 9 and 87 images of the validation split and scores each subset on 1, 2, 3 and 8 gloo
processes, in two ways. With val.py, as a user would: its results.json (except for times), classes.csv and
predictions.json must have the same bytes; a data set without images must end with the same line. And with the evaluator
as training uses it, with validation losses: all arrays of the result and all detections must be bitwise equal, also
without images.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import yaml

from utils.distributed.context import DistributedContext
from utils.distributed.spawn import spawn
from utils.errors import UserError

ROOT = Path(__file__).parents[1]
SIZES, WORLDS = (0, 1, 7, 8, 9, 87), (1, 2, 3, 8)
HANGS = "hangs"
CHANGING = ("spawn", "project", "name")  # settings that say where a validation ran, not what it found


def write_subsets(data: str, sizes: list[int], folder: Path, cache_dir: str) -> dict[int, Path]:
    """A data set YAML of the first n images of the validation split, for each n."""
    from data.index.dataset_yaml import load_dataset_spec
    from data.index.index import load_index

    spec = load_dataset_spec(data)
    index = load_index(spec, "val", cache_dir=cache_dir, progress=False)
    if max(sizes) > len(index):
        raise UserError(f"{data}: has {len(index)} validation images, {max(sizes)} are wanted; choose other --sizes")
    annotations = spec.split("val").annotations
    found = {}
    for size in sizes:
        listed, path = folder / f"{size}.txt", folder / f"{size}.yaml"
        listed.write_text("".join(f"{index.path(i)}\n" for i in range(size)), encoding="utf-8")
        content = {"path": str(spec.root), "val": str(listed), "names": list(spec.names)}
        if annotations:
            content["annotations"] = {"val": str(annotations)}
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        found[size] = path
    return found


def write_random_weights(data: str, model: str, imgsz: int, path: Path) -> Path:
    """A checkpoint of an untrained model for the set's classes."""
    from data.index.dataset_yaml import load_dataset_spec
    from models.detector import build_detector
    from utils.files.checkpoint import write_checkpoint

    names = load_dataset_spec(data).names
    detector = build_detector(model, len(names), names=names, seed=0)
    content = {"model_spec": detector.spec, "names": list(names), "imgsz": imgsz, "hyp": {}, "config": {}}
    write_checkpoint({**content, "ema": detector.state_dict()}, path)
    return path


def run_guarded(command: list[str], timeout_s: float) -> tuple[int | str, str]:
    """The exit code, or `HANGS` for a command that had to be killed with its processes; and its standard error."""
    # How many threads share a sum decides its rounding, so every process has one.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        errors = process.communicate(timeout=timeout_s)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return HANGS, process.communicate()[1]
    return process.returncode, errors


def by_val_script(options: argparse.Namespace, data: Path, folder: Path, world: int) -> dict[str, bytes] | str:
    """The files that val.py writes on ``world`` processes, by name; or how it ended if it failed."""
    command = [
        sys.executable, "val.py", "--weights", options.weights, "--data", str(data), "--imgsz", str(options.imgsz),
        "--batch-size", str(options.batch_size), "--device", "cpu", "--workers", str(options.workers), "--noplots",
        "--cache-dir", options.cache_dir, "--project", str(folder), "--name", str(world), "--exist-ok",
        *(["--spawn", str(world)] if world > 1 else []), *options.flags.split(),
    ]  # fmt: skip
    code, errors = run_guarded(command, options.timeout)
    if code:
        return f"{code}: {errors.strip()}"
    results = json.loads((folder / str(world) / "results.json").read_text())
    for key in [key for key in results["extras"] if key.startswith("ms/") or key == "data_wait"]:
        del results["extras"][key]
    for key in CHANGING:
        del results["settings"][key]
    files = {name: (folder / str(world) / name).read_bytes() for name in ("classes.csv", "predictions.json")}
    return {**files, "results.json": json.dumps(results, indent=1).encode()}


def by_evaluator(options: argparse.Namespace, sets: dict[int, Path], folder: Path, world: int) -> list[dict | str]:
    """The arrays that the evaluator computes on ``world`` processes for each subset; or how it ended if it failed."""
    command = [sys.executable, "-m", "benchmarks.sharded_validation", "--data", options.data]
    command += ["--weights", options.weights, "--imgsz", str(options.imgsz), "--batch-size", str(options.batch_size)]
    command += ["--workers", str(options.workers), "--cache-dir", options.cache_dir, "--world", str(world)]
    command += ["--sizes", *map(str, sets), "--folder", str(folder)]
    code, errors = run_guarded(command, options.timeout * len(sets))
    if code:
        return [f"{code}: {errors.strip()}"] * len(sets)
    found: list[dict | str] = []
    for size in sets:
        with np.load(folder / f"{world}-{size}.npz") as arrays:
            found.append({name: arrays[name].tobytes() for name in arrays.files})
    return found


def evaluate_sets(options: argparse.Namespace) -> None:
    """Runs on every rank: evaluates the subsets as training does; the first rank writes the results."""
    import torch

    from engine.evaluation.evaluator import Evaluator
    from models.postprocess.detections import select_detections
    from models.weights.load import load_detector
    from utils.config.settings import Hyperparameters
    from utils.logger import configure_logging

    torch.set_num_threads(1)
    ctx = DistributedContext.from_environment("cpu")
    configure_logging(False)
    model, _ = load_detector(options.weights)
    model = model.to(memory_format=torch.channels_last)
    iou = model.head.validation_iou
    for size in options.sizes:
        loader = loader_of(options, ctx, size, model.stride)
        evaluator = Evaluator(
            ground_truth=loader.index.ground_truth(),
            num_classes=model.num_classes,
            postprocess=lambda m, raw: select_detections(*m.decode(raw), conf_thres=0.001, iou_thres=iou, max_det=300),
            ctx=ctx,
            criterion=model.head.build_loss(Hyperparameters()),
        )
        result = evaluator.run(model, loader)
        if result is not None:
            arrays = {f.name: np.asarray(getattr(result, f.name)) for f in dataclasses.fields(result)}
            del arrays["extras"]
            arrays |= {name: np.asarray(v) for name, v in result.extras.items() if name.startswith("val/")}
            found = evaluator.detections
            arrays |= {f"found.{f.name}": getattr(found, f.name) for f in dataclasses.fields(found)}
            np.savez(
                options.folder / f"{ctx.world_size}-{size}.npz", **{k.replace("/", "."): v for k, v in arrays.items()}
            )
    ctx.close()


def loader_of(options: argparse.Namespace, ctx: DistributedContext, size: int, stride: int):
    """This rank's validation loader of a set. One without images is refused by the scan, so it is made by hand."""
    from data.dataset import LoadImagesAndLabels
    from data.index.dataset_yaml import load_dataset_spec
    from data.loading.build import build_val_loader
    from data.loading.loader import ValidationLoader
    from tests.helpers.synthetic_index import index_of
    from utils.config.settings import ValConfig

    spec = load_dataset_spec(options.folder / f"{size}.yaml")
    if size:
        config = ValConfig(
            weights=[], imgsz=options.imgsz, batch_size=options.batch_size, cache_dir=options.cache_dir,
            workers=options.workers,
        )  # fmt: skip
        return build_val_loader(ctx, config, spec, stride=stride)
    index = index_of(spec.names, [], np.zeros((0, 2)), [0], np.zeros((0, 4)), [])
    return ValidationLoader(LoadImagesAndLabels(index, imgsz=options.imgsz), [], workers=options.workers)


def verdict(first: dict | str, other: dict | str) -> tuple[bool, str]:
    """Whether two results of a subset are equal, and a word for it."""
    if isinstance(first, str) or isinstance(other, str):
        same = first == other and first.startswith("2: error: ") and len(first.splitlines()) == 1
        return same, "same line" if same else f"ended with {str(other)[:120]}"
    differing = [name for name in first.keys() | other.keys() if first.get(name) != other.get(name)]
    return not differing, "same" if not differing else "differs in " + ", ".join(sorted(differing)[:4])


def ap_of(found: dict | str) -> str:
    if isinstance(found, str):
        return "-"
    value = json.loads(found["results.json"])["ap"]
    return "-" if value is None else repr(value)


def prove(options: argparse.Namespace) -> bool:
    every, begun = True, time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options.cache_dir = str(folder / "cache")
        sets = write_subsets(options.data, options.sizes, folder, options.cache_dir)
        if not options.weights:
            options.weights = str(
                write_random_weights(options.data, options.model, options.imgsz, folder / "random.pt")
            )
        inside = {world: by_evaluator(options, sets, folder, world) for world in options.worlds}
        print(
            "| images | way | AP | " + " | ".join(f"{w} process{'es' if w > 1 else ''}" for w in options.worlds) + " |"
        )
        print("| --- | --- | --- |" + " --- |" * len(options.worlds), flush=True)
        for place, (size, data) in enumerate(sets.items()):
            outside = [by_val_script(options, data, folder / f"runs{size}", world) for world in options.worlds]
            within = [inside[world][place] for world in options.worlds]
            for way, found in (("val.py", outside), ("evaluator", within)):
                verdicts = [verdict(found[0], other) for other in found]
                words = " | ".join(word for _, word in verdicts)
                ap = ap_of(outside[0]) if way == "val.py" else ""
                print(f"| {size} | {way} | {ap} | {words} |", flush=True)
                every &= all(same for same, _ in verdicts)
            every &= size == 0 or not isinstance(outside[0], str)
    print(f"{'all the same' if every else 'NOT all the same'}; {time.monotonic() - begun:.0f} s")
    return every


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.sharded_validation", description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="data set YAML")
    parser.add_argument("--weights", default="", help="checkpoint; empty: an untrained --model")
    parser.add_argument("--model", default="yolov8n")
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--batch-size", type=int, default=1, help="1: as many batches as images, so ranks run dry")
    parser.add_argument("--workers", type=int, default=0, help="loader processes a rank")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="images a set")
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS, help="numbers of processes")
    parser.add_argument("--flags", default="", help="more flags for val.py, in one word: '--tta --single-cls'")
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which a validation counts as hung")
    for internal in ("--world", "--folder", "--cache-dir"):  # of the evaluator's processes
        parser.add_argument(internal, default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.world:
        options.folder = Path(options.folder)
        if options.world == "1":
            evaluate_sets(options)
        else:
            spawn(evaluate_sets, int(options.world), (options,))
        return
    for name in ("data", "weights"):
        if getattr(options, name):
            setattr(options, name, str(Path(getattr(options, name)).absolute()))
    try:
        sys.exit(0 if prove(options) else 1)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
