"""val.py scores a run as the training did."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import export
import train
import val
from tests.helpers.messages import refused
from tests.helpers.processes import Processes
from tests.helpers.scripts import PLAIN, SMALL, call
from tests.helpers.tiny import write_dataset, write_model
from tests.scripts.val.validation import read
from utils.files.torch_file import read_checkpoint


def test_val_fraction_holds_out_the_same_images_everywhere(tmp_path):
    """With another seed, on two processes and staged; when the run resumes with more images; in val.py, also of an
    exported file."""
    root = tmp_path / "set"
    runs = tmp_path / "runs"
    cache = ["--cache-dir", tmp_path / "cache"]
    data = write_dataset(root, train=12, val=1)
    data.write_text(yaml.safe_dump({"train": "images/train", "names": ["light", "dark"]}))
    command = ["--data", data, "--model", write_model(tmp_path / "tiny.yaml"), "--project", runs, *SMALL, *cache]
    command += ["--epochs", "1", "--val-fraction", "0.25"]
    call(train.main, *command, "--name", "one")
    with Processes(tmp_path / "log.txt") as two:
        two.ranks(2, *map(str, [*command, "--name", "two", "--seed", "4", "--stage", tmp_path / "stage"]))
        assert two.codes() == [0, 0], two.output()
    last, best = (runs / "one" / name for name in ("last.pt", "best.pt"))
    one, two = (read_checkpoint(runs / name / "last.pt") for name in ("one", "two"))
    assert one["val_images"] == two["val_images"] == read_checkpoint(best)["val_images"]
    assert len(one["val_images"]) == 3
    assert one["identity"] == two["identity"]
    for i in range(20, 29):
        for folder, suffix in (("images", ".png"), ("labels", ".txt")):
            name = (root / folder / "train" / "000").with_suffix(suffix)
            name.with_name(f"{i:03}{suffix}").write_bytes(name.read_bytes())
    call(train.main, "--resume", last, "--epochs", "2")
    assert read_checkpoint(last)["val_images"] == one["val_images"]
    with refused("--val-fraction 0.5: the run has 0.25, which cannot change; ..."):
        train.main(["--resume", str(last), "--epochs", "3", "--val-fraction", "0.5"])
    call(export.main, "--weights", best, "--format", "torchscript", "--no-check")
    stems = {int(Path(name).stem) for name in one["val_images"]}
    files = (best, []), (best, ["--stage", tmp_path / "stage"]), (best.with_suffix(".torchscript"), ["--trust"])
    for number, (weights, extra) in enumerate(files):
        call(val.main, "--weights", weights, *PLAIN, *extra, *cache, "--project", tmp_path / "val", "--name", number)
        assert read(tmp_path / "val" / str(number), "results")["images"] == 3
        assert {row["image_id"] for row in read(tmp_path / "val" / str(number))} == stems


@pytest.mark.slow
def test_training_in_bfloat16_validates_in_float32_as_val_py_does(tmp_path):
    data = write_dataset(tmp_path / "set", train=40, val=40)  # enough for the type to change the AP
    model = write_model(tmp_path / "tiny.yaml")
    given = ["--data", data, "--model", model, *SMALL, "--batch-size", "8", "--epochs", "60", "--val-every", "0"]
    call(train.main, *given, "--amp", "bf16", "--set", "close_mosaic=20", "--project", tmp_path / "runs")
    run = tmp_path / "runs" / "exp"
    scored = {}
    trained = read_checkpoint(run / "last.pt")["progress"]["best_fitness"]
    for amp in ("bf16", "off"):
        more = ["--amp", amp, "--project", tmp_path / "val", "--name", amp]
        call(val.main, "--weights", run / "best.pt", *PLAIN, *more)
        scored[amp] = read(tmp_path / "val" / amp, "results")["ap"]
    assert trained > 0.3
    assert scored["off"] == pytest.approx(trained, abs=1e-5)
    assert scored["bf16"] != pytest.approx(trained, abs=1e-5)
