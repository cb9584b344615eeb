"""val.py scores all classes, some, or all as one."""

from __future__ import annotations

import yaml

import export
import train
import val
from data.spec import SINGLE_CLASS_NAME
from engine.inference.predict import load
from tests.helpers.exports import calibrated_detector
from tests.helpers.messages import refused
from tests.helpers.same_content import read_csv
from tests.helpers.scripts import PLAIN, SMALL, call
from tests.helpers.tiny import TINY_MODEL, write_dataset, write_detector, write_model
from tests.scripts.val.validation import flags, read, render_set
from utils.files.torch_file import read_checkpoint


def test_a_model_of_merged_classes_is_scored_so_without_a_flag(tiny, tmp_path, capsys):
    """An exported file of the model is scored in the same way."""
    model = calibrated_detector(TINY_MODEL, (SINGLE_CLASS_NAME,))
    weights = write_detector(tmp_path / "one.pt", model, data={"source": str(tiny[0])}, config={"single_cls": True})
    call(export.main, "--weights", weights, "--format", "torchscript", "--no-check")
    for path in (weights, weights.with_suffix(".torchscript")):
        name = path.suffix[1:]
        call(val.main, *flags((tiny[0], path), tmp_path, "--noplots", "--trust", "--name", name))
        assert f"{path}: was trained with --single-cls; all classes count as one" in capsys.readouterr().out
        results = read(tmp_path / "runs" / name, "results")
        assert [(row["class"], row["instances"]) for row in results["classes"]] == [(SINGLE_CLASS_NAME, 18)]


def test_some_classes_are_scored_as_among_all(tmp_path):
    names = ["disc", "box"]
    data = render_set(tmp_path / "set")
    weights = write_detector(tmp_path / "lively.pt", calibrated_detector(TINY_MODEL, tuple(names)))

    def scored(name: str, *chosen: str) -> tuple[dict[str, str], list[dict]]:
        more = ["--data", str(data), "--max-det", "5000", "--imgsz", "256", "--name", name, "--noplots", *chosen]
        val.main(flags((data, weights), tmp_path, *more))
        folder = tmp_path / "runs" / name
        rows = {
            row["class"]: [row[name] for name in ("AP", "AP50", "AP75")] for row in read_csv(folder / "classes.csv")
        }
        return rows, read(folder)

    rows, found = scored("all")
    assert len({row["category_id"] for row in found}) == 2
    some_rows, some_found = scored("some", "--classes", "box")
    assert list(some_rows) == ["all", "box"]
    assert some_rows["box"] == rows["box"]
    assert some_found == [row for row in found if row["category_id"] == 1]
    data.write_text(yaml.safe_dump({"path": ".", "val": "images/val", "names": ["disc", "box", "fly"]}))
    both_rows, both_found = scored("both", "--classes", "1", "disc")  # which are all of the model
    assert both_found == found
    assert both_rows == rows
    # ultralytics#20786: a data set of some of the model's classes, in its own order.
    data.write_text(yaml.safe_dump({"path": ".", "val": "images/val", "names": ["box"]}))
    for labels in (data.parent / "labels/val").glob("*.txt"):
        boxes = [row.split(" ", 1)[1] for row in labels.read_text().splitlines() if row.startswith("1 ")]
        labels.write_text("".join(f"0 {box}\n" for box in boxes))
    own_rows, own_found = scored("own", "--classes", "box")
    assert own_rows["box"] == rows["box"]
    assert [row | {"category_id": 1} for row in own_found] == some_found
    data.write_text(yaml.safe_dump({"path": ".", "val": "images/val", "names": ["disc", "box", "fly"]}))
    with refused("lively.pt: has no class fly, only disc, box; choose others with --classes"):
        scored("none", "--classes", "fly")


def test_a_run_of_some_classes_is_scored_on_them_without_a_flag(tmp_path, capsys):
    """This also holds after resuming, and for an exported file."""
    runs = tmp_path / "runs"
    data = write_dataset(tmp_path / "set", train=8, val=4)
    cache = tmp_path / "cache"
    command = ["--data", data, "--model", write_model(tmp_path / "tiny.yaml"), "--project", runs, *SMALL]
    call(train.main, *command, "--cache-dir", cache, "--epochs", "1", "--name", "some", "--classes", "1")
    assert "1 of 2 classes used: dark; boxes of other classes are left out" in capsys.readouterr().out
    last, best = (runs / "some" / name for name in ("last.pt", "best.pt"))
    call(train.main, "--resume", last, "--epochs", "2")
    content = read_checkpoint(last)
    assert content["names"] == content["used_classes"] == ["dark"]
    call(export.main, "--weights", best, "--format", "torchscript", "--no-check")
    for weights in (best, best.with_suffix(".torchscript")):
        more = ["--cache-dir", cache, "--trust", "--project", tmp_path / "val", "--name", weights.suffix[1:]]
        call(val.main, "--weights", weights, *PLAIN, *more)
        results = read(tmp_path / "val" / weights.suffix[1:], "results")
        assert [row["class"] for row in results["classes"]] == ["dark"]
    exported = load(best.with_suffix(".torchscript"), device="cpu", trust=True)
    assert exported.model.trained_classes == ["dark"]
