"""`python -m tools.kfold` as real processes: pooled scores, interruption, and refusals."""

from __future__ import annotations

import csv
import io
import os
import signal
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from engine.evaluation.metrics import score_detections
from tests.helpers import scripts
from tests.helpers.preloaded import python
from tests.helpers.processes import Processes
from tests.helpers.scoring import coco_evaluate, random_case
from tests.helpers.tiny import write_dataset, write_model
from tools.kfold.__main__ import main
from tools.kfold.scores import ScoredFold, join_folds, read_fold
from utils.files.torch_file import read_checkpoint
from utils.process.launch import torchrun_variables
from utils.process.spawn import free_port

SMALL = [*scripts.SMALL[:-1], "--epochs", "2"]  # with plots

pytestmark = pytest.mark.usefixtures("preloaded")


def test_pooled_scores_are_those_of_pycocotools_on_the_union():
    cases = [random_case(seed, num_images=n) for seed, n in ((0, 7), (1, 12), (2, 5))]
    pooled = join_folds([ScoredFold(gt, table, table.take(table.scores > 0.5)) for gt, table, _ in cases])
    assert pooled.truth.num_images == 24
    stats, precision = coco_evaluate(pooled.truth, pooled.for_ap)
    result = score_detections(pooled.truth, pooled.for_ap, 4).result
    assert result.ap == pytest.approx(stats[0], abs=1e-12)
    assert result.metrics["AP50"] == pytest.approx(stats[1], abs=1e-12)
    assert result.ap_large == pytest.approx(stats[5], abs=1e-12)
    np.testing.assert_allclose(result.class_ap[:3], precision[:, :, :3, 0].mean((0, 1)), atol=1e-12)
    assert pooled.result().ap == result.ap
    shown = pooled.for_ap.take(pooled.for_ap.scores > 0.5)
    assert pooled.result().metrics["f1"] == score_detections(pooled.truth, shown, 4).result.metrics["f1"]
    apart = np.mean([score_detections(gt, table, 4).result.ap for gt, table, _ in cases])
    assert abs(apart - result.ap) > 1e-4  # a mean of folds is something else


@pytest.fixture(scope="module")
def root_and_flags(tmp_path_factory):
    root = tmp_path_factory.mktemp("kfold")
    data = write_dataset(root / "set", train=8, val=4)
    model = write_model(root / "tiny.yaml")
    flags = ["--data", data, "--model", model, *SMALL, "--project", root, "--cache-dir", root, "--folds", "2"]
    return root, [str(flag) for flag in (*flags, "--set", "ema_tau=1")]


def table(folder):
    with open(folder / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def whole(root_and_flags) -> tuple[Path, str]:
    """A cross-validation, which is the only process of a launcher, and what it has printed.

    The trainings and scorings do not share the launcher's variables.
    """
    root, flags = root_and_flags
    with pytest.MonkeyPatch.context() as launcher, redirect_stdout(io.StringIO()) as printed:
        for name, value in torchrun_variables(0, 1, free_port()).items():
            launcher.setenv(name, value)
        main([*flags, "--name", "whole"])
    return root / "whole", printed.getvalue()


@pytest.mark.slow
def test_folds_are_scored_alone_and_together(whole):
    folder, printed = whole
    rows = table(folder)
    assert [(row["fold"], row["images"]) for row in rows] == [("1", "6"), ("2", "6"), ("pooled", "12")]
    pooled = join_folds([read_fold(folder / f"fold{n}" / "detections.npz") for n in (1, 2)])
    stats, _ = coco_evaluate(pooled.truth, pooled.for_ap)
    assert float(rows[-1]["AP"]) == pytest.approx(max(stats[0], 0), abs=1e-6)
    assert all(word in printed for word in ("fold 1", "fold 2", "mean", "std", "pooled", "light", "dark"))


@pytest.mark.slow
def test_a_killed_cross_validation_continues(root_and_flags, whole, tmp_path):
    root, flags = root_and_flags
    killed = root / "killed"
    with Processes(tmp_path / "log") as processes:
        process = processes.start([python(), "-m", "tools.kfold", *flags, "--name", "killed"])
        processes.until(lambda: (killed / "fold2" / "last.pt").exists())
        os.kill(process.pid, signal.SIGKILL)
        processes.wait_gone()  # the training, too
    first = (killed / "fold1" / "last.pt").stat().st_mtime_ns
    assert not (killed / "results.csv").exists()
    main([*flags, "--name", "killed"])
    assert (killed / "fold1" / "last.pt").stat().st_mtime_ns == first
    assert table(killed) == table(whole[0])
    main([*flags, "--name", "killed"])
    for number in (1, 2):
        weights = [read_checkpoint(folder / f"fold{number}" / "best.pt")["ema"] for folder in (whole[0], killed)]
        assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
