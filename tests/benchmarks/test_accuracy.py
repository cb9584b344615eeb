"""The accuracy protocol: declared variants, copies of data sets, and differences with intervals."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from benchmarks.accuracy import __main__ as tool
from benchmarks.accuracy.runs import copy_data
from benchmarks.accuracy.summary import VariantScores, difference, read_runs
from benchmarks.accuracy.variants import Variant
from benchmarks.entrypoint import run_benchmark
from data.dataset.yaml_file import load_dataset_spec
from data.index.index import IndexSettings
from data.index.load import load_index
from tests.helpers.tiny import write_dataset

pytestmark = pytest.mark.benchmarks


# Stand-ins for a revision's scripts: a training is only recorded, and each of its detections is perfect.
SCRIPTS = {
    "train.py": "import sys; print(*sys.argv[1:], file=open({noted!r}, 'a'))",
    "val.py": """
import json, sys
from pathlib import Path

flags = dict(zip(sys.argv[1:], sys.argv[2:]))
folder = Path(flags["--project"], flags["--name"])
folder.mkdir()
splits = json.loads(Path({perfect!r}).read_text())
(folder / "predictions.json").write_text(json.dumps(splits[flags["--task"]]))
""",
}


# Stands in for the peer's Python: it has Ultralytics, which finds the same objects, and numbers classes from 1.
PEER = """\
#!{python} -IS
import json, os, sys

if sys.argv[1] == "-c":
    sys.exit(0)
flags = dict(zip(sys.argv, sys.argv[1:]))
if "val" in sys.argv:
    folder = os.path.join(flags["--project"], flags["--name"])
    os.mkdir(folder)
    rows = json.load(open({perfect!r}))[flags["--split"]]
    for row in rows:
        row.update(category_id=row["category_id"] + 1, file_name=f"{{row['image_id']}}.jpg")
    json.dump(rows, open(os.path.join(folder, "predictions.json"), "w"))
"""


class Tool:
    """Calls the program. The variants train with `SCRIPTS`."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.noted = folder / "noted.txt"
        self.data = write_dataset(folder / "set", train=4, val=3)
        self.declare("a: {model: m, epochs: 2, revision: perfect}\nb: {weights: w.pt, epochs: 2, revision: perfect}\n")
        (folder / "w.pt").touch()
        tree = folder / "out" / "trees" / "perfect"
        tree.mkdir(parents=True)
        perfect = folder / "perfect.json"
        perfect.write_text(json.dumps({"val": perfect_rows(self.data)}))
        for name, text in SCRIPTS.items():
            (tree / name).write_text(text.format(noted=str(self.noted), perfect=str(perfect)))
        self.peer = folder / "peer"
        self.peer.write_text(PEER.format(python=sys.executable, perfect=str(perfect)))
        self.peer.chmod(0o755)
        monkeypatch.setattr(tool, "end_on_signals", lambda: None)

    @property
    def trained(self):
        """The model or weights, the data set's folder and the seed of each training."""
        lines = self.noted.read_text().splitlines() if self.noted.exists() else []
        commands = [dict(zip(line.split(), line.split()[1:])) for line in lines]
        return [(c.get("--model") or c["--weights"], Path(c["--data"]).parent.name, int(c["--seed"])) for c in commands]

    def declare(self, text):
        (self.folder / "variants.yaml").write_text(text)

    def __call__(self, action, *flags, data=()):
        words = [action, str(self.folder / "variants.yaml"), "--out", str(self.folder / "out"), *map(str, flags)]
        words += ["--weights-dir", str(self.folder), "--data", *map(str, data or [self.data])]
        self.monkeypatch.setattr(sys, "argv", ["accuracy", *words])
        run_benchmark(tool.main)

    def refuses(self, match, *words, data=()):
        before = self.trained
        with pytest.raises(SystemExit, match=rf"^error: .*{match}"):
            self(*words, data=data)
        assert self.trained == before


def perfect_rows(yaml_file):
    """Returns a detection for each object of the split val, as val.py writes it."""
    index = load_index(load_dataset_spec(yaml_file), "val", IndexSettings(progress=False))
    gt = index.ground_truth()
    image = np.repeat(np.arange(gt.num_images), np.diff(gt.offsets))
    boxes = zip(image, gt.classes.tolist(), gt.boxes_xywh_px.tolist())
    return [{"image_id": gt.image_ids[i], "category_id": c, "bbox": box, "score": 0.9} for i, c, box in boxes]


@pytest.fixture
def program(tmp_path, monkeypatch):
    pytest.importorskip("pycocotools")
    return Tool(tmp_path, monkeypatch)


def test_a_changed_variant_does_not_take_over_the_old_result(program):
    program("run", "--only", "a")
    assert program.trained == [("m", "data", 0), ("m", "data", 1)]
    program("run", "--only", "a", "--seeds", "0")
    assert len(program.trained) == 2
    program.declare("a: {model: m, epochs: 3, revision: perfect}\n")
    for action in ("run", "show"):
        program.refuses("a: epochs changed since .*/out/a/data/0", action)
    results = [json.loads(path.read_text()) for path in program.folder.glob("out/a/data/*/result.json")]
    assert [result["val"] for result in results] == pytest.approx([1, 1])


def test_the_peer_is_trained_and_scored_with_its_python_alone(program, capsys):
    """No other program of its environment is needed."""
    program.declare("a: {model: m, epochs: 2, revision: perfect}\np: {peer: ultralytics, model: m, epochs: 2}\n")
    program.refuses("--peer is required", "run")
    program("run", "--seeds", "0", "--peer", program.peer)
    program("show", "--draws", "100", "--base", "p")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[:2] for line in lines if line.startswith(("| a |", "| p |"))] == [
        ["| a", "1.0000 (1)"],
        ["| p", "1.0000 (1)"],
        ["| a", "+0.0000"],
    ]


def test_both_sides_rows_of_the_same_detections_have_the_same_ap(tmp_path):
    """The peer numbers classes from 1 and names files. Perfect detections of either side have an AP of 1."""
    source = write_dataset(tmp_path / "set", train=6, val=4)
    data = copy_data(source, tmp_path / "copy", subset=3)
    assert len(list((tmp_path / "copy/images/train").rglob("*.*"))) == 3
    gt = data.gt["val"]
    image = np.repeat(np.arange(gt.num_images), np.diff(gt.offsets))
    rows = [
        {"image_id": gt.image_ids[i], "category_id": int(c), "bbox": box.tolist(), "score": 0.9 - 0.001 * n}
        for n, (i, c, box) in enumerate(zip(image, gt.classes, gt.boxes_xywh_px))
    ]
    peer = [r | {"category_id": r["category_id"] + 1, "file_name": f"{r['image_id']}.jpg"} for r in rows]
    for name, content in (("ours", rows), ("peer", peer)):
        folder = tmp_path / name / "0"
        folder.mkdir(parents=True)
        (folder / "val.json").write_text(json.dumps(content))
        variant = Variant(name=name, epochs=1)
        result = {"val": 1.0, "train_cpu_s": 2.0, "variant": asdict(variant) | {"flags": []}}
        (folder / "result.json").write_text(json.dumps(result))
        found = read_runs(tmp_path / name, variant, data, draws=5)
        assert np.allclose(found.drawn, 1.0)


def test_the_interval_covers_sets_seeds_and_images():
    """With independent normal noise of the three kinds, the variance of the draws is that of sampling."""
    rng = np.random.default_rng(0)
    sets = 40
    seeds = 30
    draws = 4000
    sides = [{}, {}]
    gains = rng.normal(0.02, 0.03, sets)
    for number in range(sets):
        images = rng.normal(0, 0.01, draws)  # drawn for both sides alike, so it cancels
        for side, gain in zip(sides, (0.0, gains[number])):
            ap = 0.5 + gain + rng.normal(0, 0.02, seeds)
            side[str(number)] = VariantScores(ap, ap[:, None] + images, np.zeros(seeds))
    by_set, drawn = difference(*sides)
    assert np.mean(list(by_set.values())) == pytest.approx(gains.mean(), abs=0.002)
    expected = np.var(list(by_set.values())) / sets + 2 * 0.02**2 / seeds / sets
    assert drawn.var() == pytest.approx(expected, rel=0.15)
