"""train.py, val.py and detect.py on tiles of large images, as their users start them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import train
import val
from engine.evaluation.evaluator import Evaluator
from engine.inference.predict import load
from models.postprocess.tiles import Tiles
from tests.helpers.same_content import assert_same_content
from tests.helpers.scripts import PLAIN, SMALL, call, run_python
from tests.helpers.tiny import write_model, write_tiled_dataset
from utils.detections import DetectionTable
from utils.files.torch_file import read_checkpoint


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A data set with ``tile: 96``, a model, and a cache."""
    root = tmp_path_factory.mktemp("inputs")
    write_tiled_dataset(root, [(220, 300), (250, 180), (60, 80)], tile=96, squares=8, seed=0)
    write_model(root / "tiny.yaml")
    return root


def flags(inputs: Path, project: Path, *more: str) -> list[str]:
    model = ["--data", str(inputs / "data.yaml"), "--model", str(inputs / "tiny.yaml")]
    return [*model, "--project", str(project), "--cache-dir", str(inputs / "cache"), *SMALL, "--batch-size", "8", *more]


def test_val_and_detection_know_the_tiles_of_a_checkpoint(inputs, tmp_path, monkeypatch):
    """val.py finds what validation in training finds, also with a YAML without tiles; --tile 0 scales whole images."""
    tables = []
    original = Evaluator.run

    def recorded(evaluator, *args, **more):
        evaluation = original(evaluator, *args, **more)
        tables.append(evaluation.for_ap)
        return evaluation

    monkeypatch.setattr(Evaluator, "run", recorded)
    train.main(flags(inputs, tmp_path, "--epochs", "1", "--set", "warmup_epochs=0", "--optimizer", "SGD"))
    best = tmp_path / "exp" / "last.pt"
    content = read_checkpoint(best)
    assert content["tile"] == 96
    plain = tmp_path / "plain.yaml"
    plain.write_text((inputs / "data.yaml").read_text().replace("tile: 96", f"path: {inputs}"))
    common = ["--weights", best, *PLAIN, "--batch-size", "8", "--cache-dir", inputs / "cache"]
    found = {}
    choices = {"tiles": ["--data", plain], "whole": ["--tile", "0"], "overlap": ["--overlap", "0.5"]}
    for name, more in choices.items():
        call(val.main, *common, "--project", tmp_path / "val", "--name", name, *more)
        found[name] = (tmp_path / "val" / name / "predictions.json").read_bytes()
    assert len(set(found.values())) == 3
    in_training, after = tables[:2]
    assert len(after.scores) > 4
    for name in DetectionTable.__slots__:
        np.testing.assert_allclose(getattr(after, name), getattr(in_training, name), rtol=1e-5, atol=1e-3)
    assert load(best, device="cpu").tiles == Tiles(96, full_image=False, scaled=True)
    assert load(best, device="cpu", tiles=False).tiles is None


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--image-weights", "--multi-scale"], ["--cache", "ram", "--quad"]])
def test_two_processes_and_a_resumed_run_have_the_bits_of_one(inputs, tmp_path, more):
    more = ["--epochs", "2", "--virtual-ranks", "2", "--save-period", "1", *more]
    run_python("train.py", *flags(inputs, tmp_path, "--name", "one", *more))
    run_python("train.py", *flags(inputs, tmp_path, "--name", "two", "--spawn", "2", *more))
    one, two = (read_checkpoint(tmp_path / name / "last.pt") for name in ("one", "two"))
    assert one["progress"]["best_fitness"] == two["progress"]["best_fitness"]
    (tmp_path / "cut" / "exp").mkdir(parents=True)
    (tmp_path / "two" / "epoch1.pt").rename(tmp_path / "cut/exp/last.pt")
    done = run_python("train.py", "--resume", "--project", tmp_path / "cut", "--workers", "1")
    assert "have changed since" not in done.stdout + done.stderr
    resumed = read_checkpoint(tmp_path / "cut/exp/last.pt")
    for other in (two, resumed):
        for part in ("model", "ema", "optimizer"):
            assert_same_content(one[part], other[part])
