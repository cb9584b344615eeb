"""Cross-validation: trains once per fold, scores each model on the images of its fold, then all images together."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml

from data.folds.assign import assign_folds, class_counts, groups_of, rare_classes, scan_settings
from data.index.index import DatasetIndex, concatenated
from data.index.load import load_index
from data.labels.yolo import YOLO
from data.source.dataset_spec import DatasetSpec, DataSource, class_names
from data.source.files import shards_of
from data.source.open import open_data
from engine.evaluation.metrics import METRICS, Fitness
from tools.continued import continued, folder_of, train_config
from tools.kfold.scores import ScoredFold, format_folds, pool, read_fold, score_fold
from tools.training import TrainingFailed, train
from utils.config.search_settings import KfoldConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.folders import check_run_dir
from utils.files.locks import FileLock
from utils.files.safe_io import write_csv, write_whole
from utils.logger import get_logger
from utils.machine.stop_signals import StopSignals
from utils.strings import FlatStrings, counted
from utils.structures import EvalResult

TABLE = "folds.csv"
SPLITS = ("train", "val")  # splits whose images are divided; "test" stays apart
DETECTIONS = "detections.npz"  # file in the folder of a finished fold


@dataclass(frozen=True)
class CrossValidation:
    """Scores of all finished folds: of each alone, and of their images together."""

    folds: list[EvalResult]
    pooled: EvalResult


def pooled_index(spec: DatasetSpec, config: KfoldConfig) -> DatasetIndex:
    """Joins the usable images of `SPLITS` to one split, with each image once. Raises the errors of `load_index`."""
    indexes = [load_index(spec, split, scan_settings(config)) for split in SPLITS if split in spec.splits]
    paths = [os.path.normpath(path) for index in indexes for path in index.paths]
    joined = replace(
        indexes[0],
        **concatenated(indexes),
        paths=FlatStrings.of(paths),
        image_ids=None,
        category_ids=(),
        fingerprint="",
    )
    first_positions = {path: position for position, path in reversed(list(enumerate(paths)))}
    return joined.take(np.array(sorted(first_positions.values())))


def run_folds(config: KfoldConfig, signals: StopSignals) -> None:
    """Implements ``python -m tools.kfold``.

    Raises UserError if the settings are wrong, or differ from those with which the folder was started, and as `train`
    does.
    """
    log = get_logger()
    folder, spec, fitness, names = prepare(config)

    def after_fold(number: int, so_far: CrossValidation) -> bool:
        log.info("fold %d of %d: %s %.4f", number, config.folds, fitness.name, fitness.of(so_far.folds[-1]))
        return True

    with FileLock(folder / ".kfold.lock") as lock:
        holder = lock.acquire()
        if holder:
            raise UserError(f"{folder}: another process is working on these folds ({holder})")
        with continued(config, folder / "kfold.yaml", made=[TABLE]):
            make_folds(config, spec, folder, fitness)
            log.info("training; each fold has a log: %s", folder / "fold1" / "train.log")
            results = cross_validate(config, folder, folder, fitness, signals, after_fold)
        assert results is not None, "after_fold never ends the folds"
        write_results(folder / "results.csv", results, names)
    for line in format_folds(results.folds, results.pooled, names):
        log.info("%s", line)
    message = "%s of all images, each scored by a model that has not seen it: %.4f; results are in %s"
    log.info(message, fitness.name, fitness.of(results.pooled), folder)


def prepare(config: KfoldConfig) -> tuple[Path, DatasetSpec, Fitness, tuple[str, ...]]:
    """Opens the data and creates the folder of the results, for ``tools.kfold`` and ``tools.search``.

    Returns the folder, the data, the fitness to compare by, and the names of the classes.
    """
    if config.keep_old:
        raise UserError("--keep-old: the labels cannot score the classes that it keeps; use train.py")
    source = DataSource(config.data, classes=tuple(config.classes), cache_dir=config.cache_dir)
    spec = open_data(source, DistributedContext.single())
    names = class_names(spec, config.single_cls)
    fitness = Fitness.parse(config.fitness, names)
    check_run_dir(config.project, config.name, exist_ok=True)
    folder = folder_of(config)
    folder.mkdir(parents=True, exist_ok=True)
    return folder, spec, fitness, names


def make_folds(config: KfoldConfig, spec: DatasetSpec, folder: Path, fitness: Fitness) -> None:
    """Divides the training and validation images, unless the folds are in ``folder`` already.

    Raises UserError if they cannot be divided, or a fold would have nothing to score.
    """
    if (folder / TABLE).is_file():
        return
    spec.split("train")
    if any(shards_of(source, split) for split in spec.splits for source in (spec.splits[split].parts or (spec,))):
        raise UserError(f"{spec.source}: is in shards; folds are lists of files, so name the folder of the images")
    index = pooled_index(spec, config)
    group = groups_of(index, config.groups, config.near_duplicates)
    counts = class_counts(index)
    fold = assign_folds(group, counts, config.folds, config.seed)
    boxes = counts.sum(1) if fitness.class_index is None else counts[:, fitness.class_index]
    empty = np.flatnonzero(np.bincount(fold, boxes, minlength=config.folds) == 0)
    if len(empty):  # raised before any fold is trained
        missing = "object" if fitness.class_index is None else "object of this class"
        raise UserError(
            f"--folds {config.folds} --fitness {fitness.name}: fold {empty[0] + 1} has no {missing} to score; "
            f"{len(np.unique(group[boxes > 0]))} of {group.max() + 1} groups of images have one; use fewer folds"
        )
    warning = rare_classes(index, config.folds)
    if warning:
        get_logger().warning("%s", warning)
    if spec.classes or spec.class_of:  # writes all classes, among which each training chooses
        labeled = pooled_index(spec.as_labeled(), replace(config, single_cls=False))
        index = labeled.take(_positions(labeled, index))
    write_folds(folder, spec, index, group, fold)
    images = counted(len(index), "image")
    groups = counted(group.max() + 1, "group")
    get_logger().info("%s in %s, %d folds; lists: %s", images, groups, config.folds, folder)


def _positions(index: DatasetIndex, part: DatasetIndex) -> np.ndarray:
    """Returns the positions in ``index`` of the images of ``part``, which has the same or fewer: int64 (n,)."""
    position_of = {path: position for position, path in enumerate(index.paths)}
    return np.array([position_of[path] for path in part.paths], np.int64)


def write_folds(folder: Path, spec: DatasetSpec, index: DatasetIndex, group: np.ndarray, fold: np.ndarray) -> None:
    """Writes a YAML and lists of images for each fold to ``folder``, and last the table with the fold of each image.

    The data set itself stays untouched. Labels in YOLO's format are read from their own files. Others are written as
    COCO JSON, from the index, because a data set YAML has one annotation file for each split, and a fold takes images
    from several.

    ``group``, ``fold``: int64 (N,), group and fold of each image of ``index``. Raises UserError if two images with
    labels in another format than YOLO's, or from joined data sets, have the same file name, or if a name has line
    breaks, or spaces around it.
    """
    names = [os.path.basename(path) for path in index.paths]
    is_yolo = all(spec.splits[split].label_format is YOLO for split in SPLITS if split in spec.splits)
    if not is_yolo and len(set(names)) < len(names):
        repeated = next(name for i, name in enumerate(names) if name in names[:i])
        raise UserError(
            f"{spec.source}: two images are called {repeated}; with labels in COCO's or VOC's format, and in joined "
            "data sets, the images of all folds need different names"
        )
    paths = [str(index.path(i)) for i in range(len(index))]
    unlistable = next((path for path in paths if path.strip().splitlines() != [path]), None)
    if unlistable is not None:
        raise UserError(f"{spec.source}: {unlistable!r}: lists cannot hold such a name; rename the image and its label")
    for number in range(int(fold.max()) + 1):
        content = {"path": str(spec.root), **spec.content()}
        for split, is_member in zip(SPLITS, (fold != number, fold == number)):
            images = np.flatnonzero(is_member)
            stem = folder.absolute() / f"fold{number + 1}_{split}"
            content[split] = f"{stem}.txt"
            write_whole(f"{stem}.txt", "".join(f"{paths[i]}\n" for i in images.tolist()))
            if not is_yolo:
                content.setdefault("annotations", {})[split] = f"{stem}.json"
                write_whole(f"{stem}.json", json.dumps(_coco(index, images)))
        write_whole(data_of(folder, number), yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    rows = zip(index.paths, group.tolist(), (fold + 1).tolist(), strict=True)
    write_csv(folder / TABLE, [("image", "group", "fold"), *rows])


def data_of(folder: Path, number: int) -> Path:
    """Returns the path of the data set YAML for fold ``number``, counted from 0."""
    return folder / f"fold{number + 1}.yaml"


def _coco(index: DatasetIndex, images: np.ndarray) -> dict[str, list[dict]]:
    """Returns COCO JSON for ``images``, int64 (n,)."""
    annotations = []
    entries = []
    sizes = index.image_hw.tolist()
    truth = index.ground_truth()  # splits an ignore region of all classes into one of each class
    columns = {"category_id": truth.classes, "bbox": truth.boxes_xywh_px, "area": truth.area_px}
    columns["iscrowd"] = truth.crowd.astype(int)
    for i in images.tolist():
        height, width = sizes[i]
        entries.append({"id": i, "file_name": os.path.basename(index.paths[i]), "height": height, "width": width})
        for row in range(*truth.offsets[i : i + 2]):
            values = {name: column[row].tolist() for name, column in columns.items()}
            annotations.append({"id": row, "image_id": i, **values})
    categories = [{"id": number, "name": name} for number, name in enumerate(index.names)]
    return {"images": entries, "categories": categories, "annotations": annotations}


def cross_validate(
    config: KfoldConfig,
    lists: Path,
    folder: Path,
    fitness: Fitness,
    signals: StopSignals,
    on_fold: Callable[[int, CrossValidation], bool] = lambda number, so_far: True,
) -> CrossValidation | None:
    """Trains and scores every fold that is not finished yet. Raises as `train` does.

    Args:
        lists: folder in which `make_folds` has written the lists.
        folder: parent folder of the trainings: fold1, fold2, ...
        on_fold: called after each fold with the number of finished folds and their results. If it returns False, the
            remaining folds are skipped and the result is None.
    """
    scored: list[ScoredFold] = []
    results: list[EvalResult] = []
    so_far = None
    for number in range(config.folds):
        run = folder / f"fold{number + 1}"
        data = data_of(lists, number)
        run.mkdir(parents=True, exist_ok=True)
        finished = run / DETECTIONS
        if not finished.is_file():
            train(train_config(config, data=str(data)), run, fitness.column, signals)
            if not (run / "best.pt").is_file():
                raise TrainingFailed(f"fold {number + 1}: no epoch could be scored", refused=False)
            score_fold(config, run / "best.pt", data, finished)
        scored.append(read_fold(finished))
        results.append(scored[-1].result())
        so_far = CrossValidation(list(results), pool(scored).result())
        if not on_fold(number + 1, so_far):
            return None
    return so_far


def write_results(path: Path, results: CrossValidation, names: Sequence[str]) -> None:
    """Writes a table with one row per fold and one for all images together, with the AP of each class."""
    rows = [("fold", "images", *(metric.name for metric in METRICS), *(f"AP:{name}" for name in names))]
    labeled_results = [(str(number), result) for number, result in enumerate(results.folds, 1)]
    labeled_results.append(("pooled", results.pooled))
    for label, result in labeled_results:
        values = [*(result.metrics[metric.name] for metric in METRICS), *result.class_ap.tolist()]
        cells = ("" if math.isnan(value) else f"{value:.6f}" for value in values)
        rows.append((label, str(result.num_images), *cells))
    write_csv(path, rows)
