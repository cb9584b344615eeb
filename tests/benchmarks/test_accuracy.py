"""The accuracy protocol: declared variants, copies of data sets, and differences with intervals."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from benchmarks.accuracy.runs import copy_data
from benchmarks.accuracy.summary import VariantScores, difference, read_runs
from benchmarks.accuracy.variants import Variant
from tests.helpers.tiny import write_dataset

pytestmark = pytest.mark.benchmarks


def test_both_sides_rows_of_the_same_detections_have_the_same_ap(tmp_path):
    """The peer numbers classes from 1 and names files. Perfect detections of either side have an AP of 1."""
    source = write_dataset(tmp_path / "set", train=6, val=4)
    data = copy_data(source, tmp_path / "out", subset=3)
    assert len(list((data.yaml.parent / "images/train").rglob("*.*"))) == 3
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
