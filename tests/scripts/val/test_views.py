"""val.py with several views and tiles: the same scores on any number of processes."""

from __future__ import annotations

import os

import cv2
import numpy as np
import pytest

import val
from models.detector import build_detector
from tests.helpers.scripts import run_python
from tests.helpers.tiny import TINY_MODEL, write_dataset, write_detector
from tests.scripts.val.validation import flags, lasting, read


def error_lines(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("- ")]


@pytest.mark.slow
def test_results_with_tta_are_equal_on_1_2_and_3_processes(tiny, tmp_path, capsys):
    more = ["--tta", "--conf-thres", "0.0001"]
    val.main(flags(tiny, tmp_path, "--name", "1", *more))
    printed = capsys.readouterr().out
    assert "does nothing" not in printed  # TTA needs NMS, but nobody asked for it
    one = tmp_path / "runs" / "1"
    for world in ("2", "3")[: len(os.sched_getaffinity(0)) - 1]:
        ended = run_python("val.py", *flags(tiny, tmp_path, "--name", world, *more), torchrun=int(world))
        assert ended.stdout.count("AP by size") == 1
        assert error_lines(ended.stdout) == error_lines(printed) != []
        other = tmp_path / "runs" / world
        assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in other.iterdir())
        assert lasting(one) == lasting(other)
        for name in ("predictions.json", "classes.csv", "sizes.csv"):
            assert (one / name).read_bytes() == (other / name).read_bytes()
    assert lasting(one)["errors"]["kinds"]["missed"]["count"] <= 18


@pytest.mark.slow
def test_tiles_score_the_same_on_1_and_2_processes(tmp_path):
    """Images larger and smaller than a tile. Enlarged weights make the detections of an untrained model vary."""
    data = write_dataset(tmp_path / "set", val=5, size=150)
    cv2.imwrite(str(tmp_path / "set/images/val/small.png"), np.full((40, 90, 3), 120, np.uint8))
    model = build_detector(TINY_MODEL, 2, names=("light", "dark"), seed=1)
    enlarged = {key: t * (4 if t.ndim == 4 and len(t) > 1 else 1) for key, t in model.state_dict().items()}
    weights = write_detector(tmp_path / "best.pt", model, ema=enlarged)
    given = flags((data, weights), tmp_path, "--data", data, "--tile", "64", "--conf-thres", "0.0001")
    val.main([*given, "--name", "1"])
    run_python("val.py", *given, "--name", "2", "--spawn", "2")
    one, two = (tmp_path / "runs" / name for name in "12")
    assert lasting(one) == lasting(two)
    assert lasting(one)["images"] == 6
    for name in ("predictions.json", "classes.csv"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    boxes = np.array([r["bbox"] for r in read(one)])
    assert (boxes >= 0).all()
    assert len(boxes) > 100
    assert (boxes[:, 2:] > 64).any()  # joined
