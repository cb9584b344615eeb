"""Checks of scores and exported files fail for poor ones."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.gpu import scores
from tests.benchmarks.gpu.stand_ins import Scripts, lines_and_failure
from tests.helpers.tiny import write_dataset, write_weights

pytestmark = pytest.mark.benchmarks


@pytest.mark.parametrize(
    ("aps", "failure"),
    [
        ({".onnx": 0.8, ".torchscript": 0.801, ".pt2": 0.799, ".pt": 0.8}, ""),
        (
            {".onnx": 0.8, ".torchscript": 0.0, ".pt2": 0.8, ".pt": 0.8},
            "torchscript: AP 0.0000, the checkpoint's is 0.8000",
        ),
        (dict.fromkeys((".onnx", ".torchscript", ".pt2", ".pt"), 0.0), "the checkpoint's AP is 0.0000, at least 0.5"),
    ],
    ids=["equal", "a file returns zeros", "all return zeros"],
)
def test_exported_files_have_to_find_objects(tmp_path: Path, aps: dict, failure: str):
    options = Namespace(folder=tmp_path, weights=tmp_path / "last.pt", at_least=0.5, device="0")
    lines, reason = lines_and_failure(scores.exported(options, run=Scripts(aps).run))
    assert len(lines) == 4
    assert reason.startswith(failure)
    assert bool(reason) == bool(failure)


@pytest.mark.parametrize(("ap", "failure"), [(0.71, ""), (0.69, "AP 0.6900 after training on the device")])
def test_a_poor_detector_fails_the_comparison_of_scores(tmp_path: Path, ap: float, failure: str):
    options = Namespace(folder=tmp_path, weights=tmp_path / "last.pt", at_least=0.7, device="0", variants=False)
    lines, reason = lines_and_failure(scores.validate(options, run=Scripts({".pt": ap}).run))
    assert len(lines) == 2  # on the device and on the CPU
    assert reason.startswith(failure)
    assert bool(reason) == bool(failure)


def test_untrained_weights_fail_the_comparison_of_their_scores(tmp_path: Path):
    weights = write_weights(tmp_path / "last.pt", ("a", "b", "c"))
    data = str(write_dataset(tmp_path / "set", train=4, val=2))
    options = Namespace(weights=weights, data=data, imgsz=64, batch_size=2, device="cpu", at_least=0.4)
    with pytest.raises(SystemExit, match=r"at least 0\.4 expected of trained weights"):
        list(scores.score_of_weights(options))
