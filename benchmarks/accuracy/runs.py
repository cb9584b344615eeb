"""Trains a variant on one data set with one seed, and scores last.pt with pycocotools."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy.variants import Variant
from benchmarks.coco_scores import average_precision
from benchmarks.command import commit, run_process
from benchmarks.dataset_copy import copy_dataset
from benchmarks.speed.compare import peer_command
from data.index import IndexSettings
from data.load import load_index
from data.read_spec import load_dataset_spec
from utils.errors import UserError
from utils.files.safe_io import write_whole
from utils.labels import GroundTruth

# What is scored of each run, with val.py's flag; the peer, which has no box voting, has only the first.
SCORED = {"": (), " without voting": ("--no-box-voting",)}


@dataclass(frozen=True)
class DataCopy:
    """A data set in a folder of its own, so that neither side finds files that the other wrote next to the images."""

    name: str
    yaml: Path
    gt: dict[str, GroundTruth]  # of val, and of test if there is one
    classes: tuple[str, ...]


def copy_data(source: Path, out: Path, subset: int = 0) -> DataCopy:
    """Copies a data set into ``out``/data (`copy_dataset`), and reads the labels of the copy."""
    folder = out / "data" / (f"{source.stem}-{subset}" if subset else source.stem)
    path = copy_dataset(str(source), folder, subset=subset)
    spec = load_dataset_spec(path)
    settings = IndexSettings(cache_dir=str(folder / "index"), progress=False)
    gt = {split: load_index(spec, split, settings).ground_truth() for split in spec.splits if split != "train"}
    return DataCopy(source.stem, path, gt, tuple(spec.names))


@dataclass(frozen=True)
class VariantRun:
    """A training of a variant on one data set with one seed."""

    variant: Variant
    data: DataCopy
    seed: int
    folder: Path
    weights: Path | None  # starting weights; None: from scratch
    peer: str  # the peer's Python


def scored_of(variant: Variant) -> dict[str, tuple[str, ...]]:
    return {"": ()} if variant.peer else SCORED


def stored_result(folder: Path, variant: Variant) -> dict | None:
    """Returns the content of result.json in a run's folder; None if the run has not ended.

    Raises UserError if the variant's declaration has changed since.
    """
    path = folder / "result.json"
    if not path.exists():
        return None
    result = json.loads(path.read_text())
    declared = json.loads(json.dumps(dataclasses.asdict(variant)))
    changed = [key for key in declared if result["variant"].get(key) != declared[key]]
    if changed:
        raise UserError(
            f"{variant.name}: {', '.join(changed)} changed since {folder} was trained; give the variant another name, "
            f"or delete {folder.parents[1]}"
        )
    return result


def train_and_score(run: VariantRun) -> dict:
    """Trains and scores; the result is also written to result.json in the run's folder.

    Raises SystemExit, with the end of the output, if a process fails.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    began_cpu_s = _cpu_s_of_children()
    _call(_train_command(run), run.folder / "train.log")
    result: dict[str, Any] = {"train_s": time.perf_counter() - started}
    # Processor time, including workers, depends less on other load than the time.
    result |= {"train_cpu_s": _cpu_s_of_children() - began_cpu_s, "commit": commit()}
    result["variant"] = dataclasses.asdict(run.variant)
    for (split, gt), (suffix, flags) in itertools.product(run.data.gt.items(), scored_of(run.variant).items()):
        name = f"val-{split}{suffix}"
        _call([*_predict_command(run, split, name), *flags], run.folder / f"{name}.log")
        predictions = run.folder / f"{split}{suffix}.json"
        os.replace(run.folder / name / "predictions.json", predictions)
        result[f"{split}{suffix}"] = average_precision(predictions, gt, run.data.classes)
    write_whole(run.folder / "result.json", json.dumps(result, indent=1))
    return result


def _train_command(run: VariantRun) -> list[object]:
    variant = run.variant
    if variant.peer:
        return peer_command(
            run.peer, "train", data=run.data.yaml, model=run.weights or f"{variant.model}.yaml", imgsz=variant.imgsz,
            batch_size=variant.batch, epochs=variant.epochs, workers=1, seed=run.seed, project=run.folder, name="run",
            exist_ok=True, **variant.set,
        )  # fmt: skip
    command = [sys.executable, "train.py", "--data", run.data.yaml, "--device", "cpu", "--seed", run.seed]
    command += ["--imgsz", variant.imgsz, "--batch-size", variant.batch, "--epochs", variant.epochs]
    command += ["--threads", 1, "--workers", 1, "--val-every", 0, "--noplots"]
    command += ["--project", run.folder, "--name", "run", "--exist-ok", "--cache-dir", run.folder / "index"]
    command += ["--model", variant.model] if variant.model else []
    command += ["--weights", run.weights] if run.weights else []
    return [*command, *variant.flags]


def _predict_command(run: VariantRun, split: str, name: str) -> list[object]:
    """Returns a command that writes the detections of last.pt to the run's folder ``name``."""
    variant = run.variant
    if variant.peer:
        weights = run.folder / "run" / "weights" / "last.pt"
        return peer_command(
            run.peer, "validate", weights=weights, data=run.data.yaml, split=split, imgsz=variant.imgsz,
            batch_size=variant.batch, workers=1, project=run.folder, name=name,
        )  # fmt: skip
    command = [sys.executable, "val.py", "--weights", run.folder / "run" / "last.pt", "--data", run.data.yaml]
    command += ["--task", split, "--imgsz", variant.imgsz, "--device", "cpu", "--workers", 1, "--noplots"]
    command += ["--cache-dir", run.folder / "index", "--project", run.folder, "--name", name, "--exist-ok"]
    return command


def _call(command: Sequence[object], log: Path) -> None:
    """Runs a command on one thread, and writes its output to ``log``. Raises SystemExit if it fails."""
    log.write_text(run_process(command, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"), encoding="utf-8")


def _cpu_s_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
