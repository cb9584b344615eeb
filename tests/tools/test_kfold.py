"""`python -m tools.kfold`: its folds, scores and folder, and a real cross-validation that is killed."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from data.folds.assign import class_counts
from data.index import IndexSettings
from data.load import load_index
from data.open import with_classes
from data.read_spec import load_dataset_spec
from engine.evaluation.fitness import Fitness
from tests.data.data_set import DataSet
from tests.data.folds.eighteen_images import write_eighteen_images
from tests.helpers.preloaded import python
from tests.helpers.processes import Processes
from tests.helpers.same_content import read_csv
from tests.helpers.scoring import coco_evaluate, random_case
from tests.helpers.scripts import error_of, training, write_inputs
from tests.helpers.tiny import write_dataset
from tools import search
from tools.kfold import joined_index, main, make_folds, pooled_result, results_table
from utils.config.tool_settings import KfoldConfig
from utils.files.torch_file import read_checkpoint

pytestmark = pytest.mark.usefixtures("preloaded")


def test_the_joined_index_has_each_image_once_with_its_labels(tmp_path):
    config = write_eighteen_images(tmp_path)
    spec = load_dataset_spec(config.data)
    joined = joined_index(spec, config)
    assert len(joined) == 18
    parts = [load_index(spec, split, IndexSettings(cache_dir=config.cache_dir)) for split in ("train", "val")]
    rows = {index.path(i): index.labels(i) for index in parts for i in range(len(index))}
    for i in range(len(joined)):
        np.testing.assert_array_equal(joined.labels(i), rows[joined.path(i)])
    both = tmp_path / "both.yaml"
    root = tmp_path / "set"
    both.write_text(f"path: {root}\ntrain: [images/train, images/val]\nval: images/val\nnames: [light, dark]\n")
    again = joined_index(load_dataset_spec(both), config)
    assert sorted(again.paths) == sorted(joined.paths)
    assert class_counts(again).sum(0).tolist() == class_counts(joined).sum(0).tolist()


NAMES = ["a", "b"]
A = (0, 8, 8, 32, 24)
B = (1, 48, 8, 22, 24)
WITHOUT_AREA = (1, 20, 20, 0, 0)


def write_set(folder: Path) -> None:
    """Writes nine images of three groups, alternately. The second, the third and the fifth have lost a label, the last
    two of these have no b, and the last image is a background."""
    rows = [[A, B], [A, B, WITHOUT_AREA], [A, WITHOUT_AREA], [A, B], [A, WITHOUT_AREA], *[[A, B]] * 3, []]
    DataSet(folder).three_formats({f"{'xyz'[i % 3]}{i}": objects for i, objects in enumerate(rows)})


def labels_of(index) -> dict[str, tuple]:
    """Returns the labels of each image, and whether it has lost one, by its path."""
    return {
        str(Path(index.path(i)).resolve()): (index.labels(i).tolist(), bool(index.incomplete[i]))
        for i in range(len(index))
    }


@pytest.mark.parametrize(
    ("annotations", "chosen"),
    [
        ({}, {}),
        ({"annotations": "voc"}, {"classes": ["b"]}),
        ({"annotations": "all.json"}, {"ignore": ["a"]}),
        ("joined", {"single_cls": True}),
        ("joined", {"classes": ["b"]}),
    ],
)
def test_folds_have_the_images_and_groups_of_a_direct_training(tmp_path, annotations, chosen):
    write_set(tmp_path / "set")
    content = {"train": "images/train", "names": NAMES, "ignore": chosen.get("ignore", [])}
    if annotations == "joined":
        (tmp_path / "set/part.yaml").write_text(yaml.safe_dump({"train": "images/train", "names": NAMES}))
        del content["names"]
        content["train"] = ["part.yaml"]
    else:
        content |= annotations
    data = tmp_path / "set" / "data.yaml"
    data.write_text(yaml.safe_dump(content))
    classes = chosen.get("classes", [])
    single_cls = chosen.get("single_cls", False)
    cache = str(tmp_path / "cache")
    config = KfoldConfig(
        data=str(data),
        single_cls=single_cls,
        folds=3,
        groups=r"([xyz])\d",
        near_duplicates=False,
        max_bad=0.5,
        cache_dir=cache,
        project=str(tmp_path),
        name="folds",
    )
    config.folder.mkdir()
    settings = IndexSettings(cache_dir=cache, progress=False, single_cls=single_cls)
    spec = with_classes(load_dataset_spec(data), classes)
    direct = labels_of(load_index(spec, "train", settings, max_bad=0.5))
    assert len(direct) == (7 if classes or "ignore" in chosen else 9)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "set").rglob("*")}
    make_folds(config, spec, Fitness.parse("AP", spec.names))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "set").rglob("*")} == before
    rows = read_csv(config.folder / "folds.csv")
    letters = {(Path(row["image"]).name[0], row["group"], row["fold"]) for row in rows}
    assert len(letters) == 3, "the groups are divided"
    validated = {}
    for number in (1, 2, 3):
        fold = with_classes(load_dataset_spec(config.folder / f"fold{number}.yaml"), classes)
        train, val = (labels_of(load_index(fold, split, settings, max_bad=1.0)) for split in ("train", "val"))
        assert train | val == direct
        assert not train.keys() & val.keys()
        listed = {Path(row["image"]).name for row in rows if row["fold"] == str(number)}
        assert {Path(path).name for path in val} == listed
        validated |= val
    assert validated == direct


class Images:
    """A stand-in for the index of some images, by their numbers."""

    def __init__(self, numbers: np.ndarray, names: int = 0, truth=None) -> None:
        self.numbers = numbers
        self.names = ["x"] * names
        self.ground_truth = lambda: truth

    def __len__(self) -> int:
        return len(self.numbers)

    def path(self, i: int) -> str:
        return f"image {self.numbers[i]}"


def test_pooled_scores_are_those_of_pycocotools_on_all_images():
    truth, table, _ = random_case(1, num_images=24)
    shown = table.take(table.scores > 0.5)

    def fold(number: int):
        """Returns every third image, in descending order, with its detections."""
        numbers = np.arange(number, 24, 3)[::-1]
        parts = [part.take(np.isin(part.image_index, numbers)) for part in (table, shown)]
        for_ap, detected = (replace(part, image_index=(numbers[0] - part.image_index) // 3) for part in parts)
        return Images(numbers), SimpleNamespace(for_ap=for_ap, detected=detected)

    result = pooled_result(Images(np.arange(24), 4, truth), map(fold, (2, 0, 1)))
    stats, precision = coco_evaluate(truth, table)
    assert result.ap == pytest.approx(stats[0], abs=1e-12)
    assert result.metrics["AP50"] == pytest.approx(stats[1], abs=1e-12)
    np.testing.assert_allclose(result.class_ap[:3], precision[:, :, :3, 0].mean((0, 1)), atol=1e-12)


def test_undefined_scores_are_left_out_of_the_mean():
    table = results_table(["AP", "precision", "F1"], [[0.5, np.nan, 1], [0.7, 0.25, np.nan]], [0.61, 0.3, np.nan])
    assert table[3:] == [
        ["mean", "0.600000", "0.250000", "1.000000"],
        ["std", "0.141421", "", ""],
        ["pooled", "0.610000", "0.300000", ""],
    ]


@pytest.mark.parametrize("tool", [main, search.main])
def test_a_folder_with_files_of_others_is_refused_and_kept(tmp_path, capsys, tool):
    """The names are those that the commands gave to their settings before."""
    data = write_dataset(tmp_path / "set", train=4, val=2)
    flags = ["--data", data, "--project", tmp_path, "--name", "set", "--cache-dir", tmp_path, "--hyp", "auto"]
    if tool is search.main:
        pytest.importorskip("optuna")
        flags[-1] = "optimizer"
    for name in ("kfold.yaml", "search.yaml"):
        (tmp_path / "set" / name).write_text("names: [light, dark]\n")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "set").rglob("*")}
    assert "which this command has not written; choose another --name" in error_of(capsys, tool, *flags)
    (tmp_path / "set" / "folds.csv").write_text("image\n")
    (tmp_path / "set" / "journal.log").touch()
    assert "which this command has not written; choose another --name" in error_of(capsys, tool, *flags)
    assert before.items() <= {path: path.stat().st_mtime_ns for path in (tmp_path / "set").rglob("*")}.items()


def test_flags_without_a_meaning_for_several_trainings_are_refused(tmp_path, capsys):
    for flags in (["--resume"], ["--exist-ok"], ["--time", "1"], ["--export", "onnx"], ["--val-fraction", "0.2"]):
        assert f"error: {flags[0]}: leave it out; " in error_of(capsys, main, "--data", "demo", *flags)


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    root = write_inputs(tmp_path_factory.mktemp("kfold"), train=8, val=4)
    return training(root, root, "--epochs", 3, "--folds", 3, "--set", "ema_tau=1", "--fitness", "recall")


@pytest.mark.slow
def test_three_folds_of_which_the_second_is_killed_go_on(flags, tmp_path, capsys):
    """The results, and the weights of all folds, are those of an uninterrupted cross-validation."""
    flags = [*flags, "--project", str(tmp_path)]
    main([*flags, "--name", "whole"])
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("fold 3 of 3", "mean", "std", "pooled", "light", "dark"))
    killed = tmp_path / "killed"
    with Processes(tmp_path / "log") as processes:
        process = processes.start([python(), "-m", "tools.kfold", *flags, "--name", "killed"])
        processes.until(lambda: (killed / "fold2" / "last.pt").exists())
        os.kill(process.pid, signal.SIGKILL)
        processes.wait_gone()  # the training, too
    first = (killed / "fold1" / "last.pt").stat().st_mtime_ns
    assert not (killed / "fold3").exists()
    assert "is of other images, labels or --folds" in error_of(capsys, main, *flags, "--name", "killed", "--seed", "1")
    assert "--imgsz 96: the run has 64" in error_of(capsys, main, *flags, "--name", "killed", "--imgsz", "96")
    main([*flags, "--name", "killed"])
    assert (killed / "fold1" / "last.pt").stat().st_mtime_ns == first
    for name in ("results.csv", "folds.csv"):
        assert (killed / name).read_text() == (tmp_path / "whole" / name).read_text()
    assert [row["fold"] for row in read_csv(killed / "results.csv")] == ["1", "2", "3", "mean", "std", "pooled"]
    for number in (1, 2, 3):
        weights = [read_checkpoint(tmp_path / name / f"fold{number}/best.pt")["ema"] for name in ("whole", "killed")]
        assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
