"""Trains a variant on one data set with one seed, and scores last.pt with pycocotools."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy.variants import Variant
from benchmarks.coco_scores import average_precision
from benchmarks.dataset_copy import copy_dataset
from benchmarks.environment import ROOT, commit
from benchmarks.peer import PEER_SIDE
from benchmarks.processes import SHOWN_ERRORS
from data.dataset.yaml_file import load_dataset_spec
from data.index.index import IndexSettings
from data.index.load import load_index
from utils.errors import UserError
from utils.files.safe_io import write_whole
from utils.labels import GroundTruth

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_children: set[subprocess.Popen] = set()
_stopping = threading.Event()


@dataclass(frozen=True)
class DataCopy:
    """A data set in a folder of its own, so that neither side finds files that the other wrote next to the images."""

    name: str
    yaml: Path
    splits: tuple[str, ...]  # val, and test if there is one
    gt: dict[str, GroundTruth]
    classes: int


def copy_data(source: Path, folder: Path, subset: int = 0) -> DataCopy:
    """Copies a data set, with the test split if there is one (`copy_dataset`), and reads the labels of the copy."""
    path = copy_dataset(str(source), folder, with_test=True, subset=subset)
    spec = load_dataset_spec(path)
    splits = ("val", "test") if "test" in spec.splits else ("val",)
    settings = IndexSettings(cache_dir=str(folder / "index"), progress=False)
    gt = {split: load_index(spec, split, settings).ground_truth() for split in splits}
    return DataCopy(source.stem, path, splits, gt, len(spec.names))


@dataclass(frozen=True)
class Workspace:
    """Paths: the folder of results, the folder of weights, and the peer's Python."""

    out: Path
    weights: Path
    peer: str

    def folder(self, variant: Variant, data: str, seed: int) -> Path:
        return self.out / variant.name / data / str(seed)

    def copy_data(self, source: Path, subset: int = 0) -> DataCopy:
        """Copies a data set for all runs on it (`copy_data`)."""
        name = f"{source.stem}-{subset}" if subset else source.stem
        return copy_data(source, self.out / "data" / name, subset)

    def tree(self, variant: Variant) -> Path:
        return self.out / "trees" / variant.revision if variant.revision else ROOT


def stored_result(folder: Path, variant: Variant) -> dict | None:
    """Returns the content of result.json in a run's folder; None if the run has not ended.

    Raises UserError if the variant's declaration has changed since.
    """
    path = folder / "result.json"
    if not path.exists():
        return None
    result = json.loads(path.read_text())
    declared = _declaration(variant)
    changed = [key for key in declared if result["variant"].get(key) != declared[key]]
    if changed:
        raise UserError(
            f"{variant.name}: {', '.join(changed)} changed since {folder} was trained; give the variant another name, "
            f"or delete {folder.parents[1]}"
        )
    return result


def _declaration(variant: Variant) -> dict:
    """Returns the variant's declaration after a round trip through JSON."""
    return json.loads(json.dumps(dataclasses.asdict(variant)))


@dataclass(frozen=True)
class VariantRun:
    """A training of a variant on one data set with one seed."""

    workspace: Workspace
    variant: Variant
    data: DataCopy
    seed: int

    @property
    def folder(self) -> Path:
        return self.workspace.folder(self.variant, self.data.name, self.seed)

    @property
    def tree(self) -> Path:
        return self.workspace.tree(self.variant)

    @property
    def weights(self) -> Path | None:
        """The starting weights; None: from scratch."""
        return self.workspace.weights / self.variant.weights if self.variant.weights else None


def train_and_score(run: VariantRun) -> dict:
    """Trains and scores; the result is also written to result.json in the run's folder.

    Raises SystemExit, with the end of the output, if a process fails.
    """
    train = _train_peer if run.variant.peer else _train_ours
    predict = _predict_peer if run.variant.peer else _predict_ours
    run.folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    cpu_s = train(run)
    result = {"train_s": time.perf_counter() - start, "train_cpu_s": cpu_s, "commit": commit()}
    result["variant"] = _declaration(run.variant)
    for split in run.data.splits:
        predictions = run.folder / f"{split}.json"
        os.replace(predict(run, split), predictions)
        result[split] = average_precision(predictions, run.data.gt[split], run.data.classes)
    write_whole(run.folder / "result.json", json.dumps(result, indent=1))
    return result


def _train_ours(run: VariantRun) -> float:
    """Returns processor seconds, as `_call` does."""
    variant = run.variant
    command = [sys.executable, "train.py", "--data", run.data.yaml, "--device", "cpu", "--seed", run.seed]
    command += ["--imgsz", variant.imgsz, "--batch-size", variant.batch, "--epochs", variant.epochs]
    command += ["--threads", 1, "--workers", 1, "--val-every", 0, "--noplots"]
    command += ["--project", run.folder, "--name", "run", "--exist-ok", "--cache-dir", run.folder / "index"]
    if variant.model:
        command += ["--model", variant.model]
    if run.weights is not None:
        command += ["--weights", run.weights]
    return _call([*command, *variant.flags], run.tree, run.folder / "train.log")


def _predict_ours(run: VariantRun, split: str) -> Path:
    """Returns the path of the detections of last.pt, in COCO's format."""
    name = f"val-{split}"
    command = [sys.executable, "val.py", "--weights", run.folder / "run" / "last.pt"]
    command += ["--data", run.data.yaml, "--task", split, "--imgsz", run.variant.imgsz, "--device", "cpu"]
    command += ["--workers", 1, "--noplots", "--cache-dir", run.folder / "index"]
    command += ["--project", run.folder, "--name", name, "--exist-ok"]
    _call(command, run.tree, run.folder / f"{name}.log")
    return run.folder / name / "predictions.json"


def _train_peer(run: VariantRun) -> float:
    """Returns processor seconds, as `_call` does."""
    variant = run.variant
    model = f"{variant.model}.yaml" if run.weights is None else run.weights
    further = [f"{key}={json.dumps(value)}" for key, value in variant.set.items()]
    command = [run.workspace.peer, PEER_SIDE, "train", "--data", run.data.yaml, "--model", model]
    command += ["--imgsz", variant.imgsz, "--batch-size", variant.batch, "--epochs", variant.epochs, "--workers", 1]
    command += ["--no-val", "--project", run.folder]
    command += ["--set", f"seed={run.seed}", 'name="run"', "exist_ok=true", *further]
    return _call(command, run.folder, run.folder / "train.log")


def _predict_peer(run: VariantRun, split: str) -> Path:
    """Returns the path of the detections of last.pt, in COCO's format."""
    name = f"val-{split}"
    weights = run.folder / "run" / "weights" / "last.pt"
    command = [run.workspace.peer, PEER_SIDE, "val", "--weights", weights, "--data", run.data.yaml, "--split", split]
    command += ["--imgsz", run.variant.imgsz, "--batch-size", run.variant.batch, "--workers", 1]
    command += ["--project", run.folder, "--name", name]
    _call(command, run.folder, run.folder / f"{name}.log")
    return run.folder / name / "predictions.json"


def _call(command: Sequence[object], cwd: Path, log: Path) -> float:
    """Runs a command. Returns its processor seconds, including workers, which depend less on other load than its time.

    Raises SystemExit if the command fails.
    """
    words = [str(word) for word in command]
    log.unlink(missing_ok=True)  # a process of a killed run may still write to it
    with open(log, "w") as file:
        process = subprocess.Popen(words, cwd=cwd, env=os.environ | ONE_THREAD, stdout=file, stderr=subprocess.STDOUT)
        _children.add(process)
        if _stopping.is_set():
            process.terminate()
        _, status, usage = os.wait4(process.pid, 0)
        _children.discard(process)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}:\n{log.read_text()[-SHOWN_ERRORS:]}")
    return usage.ru_utime + usage.ru_stime


def end_on_signals() -> None:
    """Installs signal handlers: SIGTERM and Ctrl-C end the running commands, and raise SystemExit."""

    def end(number: int, _: object) -> None:
        _stopping.set()
        for process in list(_children):
            process.terminate()
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def prepare(workspace: Workspace, variant: Variant) -> None:
    """Checks out the variant's revision, once. Raises UserError if the revision or the weights are missing."""
    if variant.weights and not (workspace.weights / variant.weights).is_file():
        raise UserError(f"{variant.name}: {workspace.weights / variant.weights}: no such file; correct --weights-dir")
    tree = workspace.tree(variant)
    if variant.revision and not tree.exists():
        command = ["git", "worktree", "add", "--detach", tree, variant.revision]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"{variant.name}: revision {variant.revision}: {done.stderr.strip().splitlines()[-1]}")
