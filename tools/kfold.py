"""Cross-validates: for each fold, trains on the other folds and scores on this one; then scores all images together.

python -m tools.kfold --data DATA.yaml --folds 5 --weights yolox_s --epochs 50
python -m tools.kfold --data DATA.yaml --groups "patient(\\d+)"

Divides the training and validation images. Images of a group, and near-duplicates, stay in the same fold, and every
fold gets its share of every class. The same command continues after an interruption: the files of the folds are only
written once, and each training is started with ``--resume auto``.
"""

from __future__ import annotations

if __name__ == "__main__":
    from utils.process.signals import exit_on_interrupt

    exit_on_interrupt()  # while the following imports run

import csv
import dataclasses
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from utils.config.commands import command_of
from utils.config.flags import flag_name
from utils.config.parser import settings_of_child
from utils.config.settings import AUTO, TrainConfig, ValConfig, changed_settings
from utils.config.tool_settings import KfoldConfig
from utils.errors import Stopped, UserError
from utils.files.new_folder import check_run_dir, increment_path
from utils.files.safe_io import csv_text, folder_below, open_direct, read_text, write_csv, write_whole
from utils.logger import configure_logging, get_logger, get_summary_logger
from utils.machine.limits import require_posix
from utils.process.child import report_started, start_child
from utils.process.main import run_command, run_main
from utils.process.signals import StopSignals
from utils.program import command_prefix

if TYPE_CHECKING:
    from data.index import DatasetIndex
    from data.spec import DatasetSpec
    from engine.evaluation.fitness import Fitness
    from engine.evaluation.result import EvalResult, Evaluation

SPLITS = ("train", "val")  # splits that a training uses; "test" stays apart
FOLDS_CSV = "folds.csv"
LABELS_JSON = "labels.json"
FILES = rf"{FOLDS_CSV}|{LABELS_JSON}|results\.csv|fold\d+(_train\.txt|_val\.txt|\.yaml|\.log)?"
POLL_S = 0.5
REFUSED = {  # flags of train.py, and why they are refused
    "resume": "the same command continues",
    "exist_ok": "the same command continues",
    "export": "export.py exports the weights that you finally choose",
    "time": "compared trainings must have the same --epochs",
    "keep_old": "the data has no labels to score the kept classes",
    "val_fraction": "each fold is held out in turn",
}
ConfigT = TypeVar("ConfigT", bound=TrainConfig)
Rows: TypeAlias = list[dict[str, str]]  # of results.csv


def main(argv: Sequence[str] | None = None) -> None:
    run_command("kfold", _cross_validate, argv)


def _cross_validate(config: KfoldConfig) -> None:
    """Trains all folds and writes the tables. Raises UserError for what cannot be used or scored, `RunFailed` if a
    training failed, and `Stopped` after a signal."""
    from engine.evaluation.metrics import METRICS
    from engine.evaluation.tables import format_table, result_rows
    from utils.files.torch_file import read_checkpoint
    from utils.strings import aligned

    configure_logging(True, quiet=config.quiet)
    log = get_summary_logger()
    folder = config.folder
    with StopSignals() as signals:
        spec, fitness = open_comparison(config, FOLDS_CSV, FILES)
        index = make_folds(config, spec, fitness)
        report_started(folder)
        columns = list(dict.fromkeys([*(f"metrics/{metric.name}" for metric in METRICS), fitness.column]))
        names = [column.removeprefix("metrics/") for column in columns]
        folds: list[list[float]] = []
        for number in range(1, config.folds + 1):
            # What is lost has been judged for the images of all folds together.
            changes = {"data": str(folder / f"fold{number}.yaml"), "resume": AUTO, "max_bad": 1.0}
            run = settings_in(TrainConfig, config, folder / f"fold{number}", **changes)
            run_child(run, signals, total=config.epochs)
            best = run.folder / "best.pt"
            if not best.exists():
                raise UserError(f"{run.folder}: no epoch could be scored")
            metrics = read_checkpoint(best)["metrics"]
            log.info("fold %d of %d: %s %.4f", number, config.folds, fitness.name, metrics[fitness.column])
            folds.append([metrics[column] for column in columns])
            write_csv(folder / "results.csv", results_table(names, folds))
        result = pooled_result(index, (score_fold(config, number) for number in range(1, config.folds + 1)))
        metrics = {f"metrics/{name}": value for name, value in result.metrics.items()}
        metrics[fitness.column] = fitness.score_of(result)
        table = results_table(names, folds, [metrics[column] for column in columns])
        write_csv(folder / "results.csv", table)
    for line in (*aligned(table), *format_table(result_rows(result, index.ground_truth(), index.names))):
        log.info("%s", line)
    log.info("the best epoch of each fold was chosen on its own images; results are in %s", folder)


def open_comparison(config: KfoldConfig, record: str, names: str) -> tuple[DatasetSpec, Fitness]:
    """Checks the flags, opens the data without reading its images, and makes the folder of a cross-validation or a
    search.

    Args:
        record: the first file that the command writes.
        names: a pattern of the names of all its files.

    Raises UserError for refused flags, and if the folder contains files of others, which therefore are never replaced.
    """
    from data.open import open_data
    from data.spec import DataSource, class_names
    from engine.evaluation.fitness import Fitness
    from utils.distributed.context import DistributedContext

    require_posix("comparing trainings")
    for name in changed_settings(config):
        if name in REFUSED and (name != "val_fraction" or config.folds):
            raise UserError(f"{flag_name(name)}: leave it out; {REFUSED[name]}")
    folder = config.folder
    check_run_dir(config.project, config.name, exist_ok=True)
    present = [path.name for path in folder.glob("[!.]*")]
    foreign = [name for name in present if record not in present or not re.fullmatch(names, name)]
    if foreign:
        raise UserError(f"{folder}: contains {foreign[0]}, which this command has not written; choose another --name")
    source = DataSource(
        config.data,
        splits=("train",) if config.folds or config.val_fraction else SPLITS,  # folds hold out the validation images
        classes=tuple(config.classes),
        cache_dir=config.cache_dir,
        output=str(folder) if config.plots else "",
        continues_output=bool(present),
    )
    spec = open_data(source, DistributedContext.single())
    fitness = Fitness.parse(config.fitness, class_names(spec, config.single_cls))
    increment_path(config.project, config.name, exist_ok=True)
    return spec, fitness


def make_folds(config: KfoldConfig, spec: DatasetSpec, fitness: Fitness) -> DatasetIndex:
    """Divides the training and validation images, and writes a table of all, their labels as COCO JSON, and lists and a
    YAML for each fold. Returns the index of all images.

    Raises UserError if they cannot be divided, if a fold would have nothing to score, and if the folder has other
    folds.
    """
    import numpy as np
    import yaml

    from data.folds.assign import assign_folds, class_counts, rare_classes
    from data.folds.groups import groups_of
    from data.listing import check_rows
    from data.spec import ShardSplit
    from utils.files.paths import relative_name

    folder = config.folder.absolute()
    spec.split("train")
    if any(isinstance(part.split(name), ShardSplit) for name in spec.splits for part in spec.parts_of(name)):
        raise UserError(f"{spec.source}: is in shards; folds are lists of files, so name the folder of the images")
    index = joined_index(spec, config)
    group = groups_of(index, config.groups, config.near_duplicates)
    counts = class_counts(index)
    fold = assign_folds(group, counts, config.folds, config.seed)
    objects = counts.sum(1) if fitness.class_index is None else counts[:, fitness.class_index]
    empty = np.flatnonzero(np.bincount(fold, objects, minlength=config.folds) == 0)
    if len(empty):
        raise UserError(
            f"--folds {config.folds}: fold {empty[0] + 1} has no object for {fitness.name}; use fewer folds"
        )
    warning = rare_classes(index, config.folds)
    if warning:
        get_logger().warning("%s", warning)
    paths = [index.path(i) for i in range(len(index))]
    check_rows(paths)
    rows = zip(index.paths, group.tolist(), (fold + 1).tolist(), strict=True)
    _write_once(folder / FOLDS_CSV, csv_text([("image", "group", "fold"), *rows]))
    labeled = index
    if spec.classes or spec.class_of or config.single_cls:  # each training selects and merges classes itself
        labeled = joined_index(spec.with_label_classes(), dataclasses.replace(config, single_cls=False))
    base = spec.root.parent  # with the folder of the data set, no image's name is the end of another's
    names = [relative_name(labeled.path(i), base) for i in range(len(labeled))]
    _write_once(folder / LABELS_JSON, json.dumps(coco_content(labeled, names)))
    for number in range(config.folds):
        stem = f"{folder}/fold{number + 1}"
        content = {"path": str(base), **spec.content()}
        for split, is_in_split in (("train", fold != number), ("val", fold == number)):
            content[split] = f"{stem}_{split}.txt"
            _write_once(content[split], "".join(f"{paths[i]}\n" for i in np.flatnonzero(is_in_split).tolist()))
        content["annotations"] = dict.fromkeys(SPLITS, str(folder / LABELS_JSON))
        _write_once(f"{stem}.yaml", yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    sizes = (len(index), group.max() + 1, config.folds)
    get_logger().info("%d images in %d groups, %d folds; lists and logs: %s", *sizes, config.folder)
    return index


def joined_index(spec: DatasetSpec, config: KfoldConfig) -> DatasetIndex:
    """Joins the usable images of `SPLITS` into one split, with each image once. Raises the errors of `load_split`."""
    import numpy as np

    from data.flat_strings import FlatStrings
    from data.folds.held_out import index_to_divide
    from data.index import concatenated

    indexes = [index_to_divide(spec, split, config) for split in SPLITS if split in spec.splits]
    paths = [os.path.normpath(path) for index in indexes for path in index.paths]
    columns = {**concatenated(indexes), "paths": FlatStrings.of(paths)}
    joined = dataclasses.replace(indexes[0], **columns, image_ids=None, category_ids=())
    return joined.take(np.sort(np.unique(paths, return_index=True)[1]))


def coco_content(index: DatasetIndex, names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Returns the images of ``index`` with their ``names``, and their labels, as COCO JSON.

    An image with an unusable label gets an unusable annotation. Otherwise its tiles without objects would count as
    background, and so would the image in a training on some of the classes.
    """
    truth = index.ground_truth()  # splits an ignore region of all classes into one of each class
    keys = ("image_id", "category_id", "bbox", "area", "iscrowd")
    columns = (truth.image_of_box, truth.classes, truth.boxes_xywh_px, truth.area_px, truth.crowd.astype(int))
    annotations = [dict(zip(keys, row)) for row in zip(*(column.tolist() for column in columns))]
    for i in index.incomplete.nonzero()[0].tolist():
        annotations.append({"image_id": i, "category_id": None, "bbox": None})
    for number, annotation in enumerate(annotations):
        annotation["id"] = number
    sizes = index.image_hw.tolist()
    images = [
        {"id": i, "file_name": name, "height": height, "width": width}
        for i, (name, (height, width)) in enumerate(zip(names, sizes, strict=True))
    ]
    categories = [{"id": number, "name": name} for number, name in enumerate(index.names)]
    return {"images": images, "categories": categories, "annotations": annotations}


def _write_once(path: str | Path, text: str) -> None:
    """Writes a file, unless it has this text already. Raises UserError if it has another."""
    path = Path(path)
    if not path.exists():
        write_whole(path, text, durable=True)
    elif path.read_bytes() != text.encode("utf-8", "backslashreplace"):
        raise UserError(f"{path}: is of other images, labels or --folds; choose another --name")


def settings_in(cls: type[ConfigT], config: KfoldConfig, folder: Path, **changes: Any) -> ConfigT:
    """Returns the settings of a child: those of ``config`` with ``changes``, in ``folder``."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(cls)}
    return cls(**values | {"project": str(folder.parent), "name": folder.name} | changes)


def run_child(
    settings: TrainConfig, signals: StopSignals, *, total: int, on_rows: Callable[[Rows], bool] = lambda _: False
) -> bool:
    """Runs a training, or a cross-validation, in a process of its own, and shows how many of ``total`` rows its
    results.csv has. What it prints is in FOLDER.log.

    Args:
        settings: of the command. Its folder is made if necessary.
        signals: the entered signals of this process; they stop the child, which saves before it ends.
        on_rows: is called with the rows of results.csv; True ends the child.

    Returns whether ``on_rows`` has ended the child. Raises `RunFailed` if it failed, `Stopped` after a signal, and
    PermissionError for a link in place of its folder.
    """
    from tqdm import tqdm

    folder = settings.folder
    folder_below(folder.parent, folder.name)
    word, variables = settings_of_child(settings)
    command = [*command_prefix(command_of(type(settings)).name), word]
    is_ended = False
    with (
        open(f"{folder}.log", "ab", opener=open_direct) as log,
        tqdm(desc=str(folder), total=total, leave=False, disable=None) as bar,
        signals.deferred(),
        start_child(command, variables=variables, stop=signal.SIGKILL, stdout=log, stderr=subprocess.STDOUT) as child,
    ):
        while (result := child.poll()) is None and not is_ended and not signals.received:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(POLL_S)
            rows = read_rows(folder)
            bar.update(len(rows) - bar.n)
            is_ended = on_rows(rows)
        if result is None:
            child.process.terminate()
            result = child.wait()
    if signals.received:
        get_logger().info("stopped; the same command continues")
        raise Stopped(signals.code)
    if not is_ended:
        result.check()
    return is_ended


def read_rows(folder: Path) -> Rows:
    """Returns the rows of a run's results.csv; none if it does not exist yet."""
    table = folder / "results.csv"
    return [*csv.DictReader(read_text(table).splitlines())] if table.exists() else []


def score_fold(config: KfoldConfig, number: int) -> tuple[DatasetIndex, Evaluation]:
    """Detects objects in the images of a fold, with the best epoch of its training."""
    from engine.commands.val import open_model_and_data, score
    from utils.distributed.context import DistributedContext
    from utils.machine.devices import parse_devices

    run = config.folder / f"fold{number}"
    same = {name: getattr(config, name) for name in ("imgsz", "device", "workers", "cache_dir", "single_cls")}
    validation = ValConfig(weights=str(run / "best.pt"), data=f"{run}.yaml", max_bad=1.0, plots=False, **same)
    ctx = DistributedContext.single(parse_devices(config.device)[0])
    model, spec, validation = open_model_and_data(validation, ctx)
    scores = score(validation, model, spec, ctx)
    assert scores is not None, "the only process has the scores"
    return scores.index, scores.evaluation


def pooled_result(index: DatasetIndex, folds: Iterable[tuple[DatasetIndex, Evaluation]]) -> EvalResult:
    """Scores the detections of all folds together. ``index``: of all their images."""
    import numpy as np

    from engine.evaluation.metrics import score_detections
    from utils.detections import DetectionTable

    position_of = {index.path(i): i for i in range(len(index))}
    tables: list[list[DetectionTable]] = []
    for fold, evaluation in folds:
        position = np.array([position_of[fold.path(i)] for i in range(len(fold))], np.int64)
        kinds = (evaluation.for_ap, evaluation.detected)
        tables.append([dataclasses.replace(table, image_index=position[table.image_index]) for table in kinds])
    for_ap, detected = map(DetectionTable.concatenate, zip(*tables))
    return score_detections(index.ground_truth(), for_ap, len(index.names), detected=detected).result


def results_table(
    names: Sequence[str], folds: Sequence[Sequence[float]], pooled: Sequence[float] | None = None
) -> list[list[str]]:
    """Returns the cells of results.csv: the scores of each fold, and if there are ``pooled`` ones, these, and the mean
    and the standard deviation over the folds. What is undefined is an empty cell, and does not count."""
    import numpy as np

    rows = {str(number): scores for number, scores in enumerate(folds, 1)}
    if pooled is not None:
        defined = np.ma.masked_invalid(folds)
        mean = defined.mean(0).filled(np.nan)
        deviation = defined.std(0, ddof=1).filled(np.nan)
        rows |= {"mean": mean.tolist(), "std": deviation.tolist(), "pooled": pooled}
    cells = ([name, *("" if np.isnan(score) else f"{score:.6f}" for score in row)] for name, row in rows.items())
    return [["fold", *names], *cells]


if __name__ == "__main__":
    run_main(main)
