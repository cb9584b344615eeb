"""val.py with several views, and with box voting."""

from __future__ import annotations

import os

import numpy as np
import pytest

import val
from engine.evaluation.analysis import KINDS
from tests.helpers.scripts import run_python
from tests.scripts.val.validation import SIZE, flags, lasting, read


@pytest.mark.slow
def test_results_with_tta_are_equal_on_1_2_and_3_processes(tiny, tmp_path, capsys):
    more = ["--tta", "--conf-thres", "0.0001"]
    val.main(flags(tiny, tmp_path, "--name", "1", *more))
    printed = capsys.readouterr().out
    assert "does nothing" not in printed  # TTA needs NMS, but nobody asked for it
    for words in ("error at IoU 0.5", *KINDS, "all false positives"):
        assert words in printed
    one = tmp_path / "runs" / "1"
    for world in ("2", "3")[: len(os.sched_getaffinity(0)) - 1]:
        ended = run_python("val.py", *flags(tiny, tmp_path, "--name", world, *more), torchrun=int(world))
        assert ended.stdout.count("AP by size") == ended.stdout.count("error at IoU 0.5") == 1
        other = tmp_path / "runs" / world
        assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in other.iterdir())
        assert lasting(one) == lasting(other)
        for name in ("predictions.json", "classes.csv", "sizes.csv"):
            assert (one / name).read_bytes() == (other / name).read_bytes()
    assert lasting(one)["errors"]["kinds"]["missed"]["count"] <= 18


def test_tta_finds_what_one_view_does_and_more(tiny, tmp_path):
    more = ["--noplots", "--conf-thres", "0.0001", "--iou-thres", "1", "--max-det", "3000"]
    for name, flag in (("one", []), ("many", ["--augment"])):
        val.main(flags(tiny, tmp_path, "--name", name, *more, *flag))
    one, many = (read(tmp_path / "runs" / name) for name in ("one", "many"))
    keys = {(r["image_id"], r["category_id"], *r["bbox"], r["score"]) for r in many}
    assert {(r["image_id"], r["category_id"], *r["bbox"], r["score"]) for r in one} <= keys
    assert len(many) > len(one) > 0


def test_box_voting_moves_boxes_and_raises_scores(tiny, tmp_path, monkeypatch):
    """Without the votes' weight in scores, it moves boxes only."""
    for module in ("suppression", "box_voting"):
        monkeypatch.setattr(f"models.postprocess.{module}.MIN_VOTING_SCORE", 0.0)  # the model is hardly trained

    def found(name, voting):
        more = ["--name", name, "--noplots", "--conf-thres", "0", "--iou-thres", "0.5"]
        val.main(flags(tiny, tmp_path, *more, voting))
        return read(tmp_path / "runs" / name)

    voted = found("on", "--box-voting")
    plain = found("off", "--no-box-voting")
    raised = np.sort([row["score"] for row in voted]) - np.sort([row["score"] for row in plain])
    assert raised.min() >= 0
    assert raised.max() > 0
    monkeypatch.setattr("models.postprocess.box_voting.INDEPENDENCE", 0.0)
    voted = found("moved", "--box-voting")
    assert [row | {"bbox": None} for row in voted] == [row | {"bbox": None} for row in plain]
    distance = np.abs(np.array([row["bbox"] for row in voted]) - [row["bbox"] for row in plain]).max(1)
    assert 0.001 < distance.max() < SIZE / 2
