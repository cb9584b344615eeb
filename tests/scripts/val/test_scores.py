"""The scores and files of val.py."""

from __future__ import annotations

import json

import cv2
import numpy as np
import pytest
import torch
import yaml
from torch import nn

import val
from data.index import IndexSettings
from data.load import load_index
from data.read_spec import load_dataset_spec
from engine.export.formats import quiet
from tests.helpers.same_content import read_csv
from tests.helpers.scoring import coco_evaluate
from tests.helpers.scripts import error_of
from tests.scripts.val.validation import NAMES, SIZE, flags, read


def test_val_scores_a_checkpoint_as_pycocotools_does_and_writes_all_files(tiny, tmp_path, capsys):
    val.main(flags(tiny, tmp_path))
    folder = tmp_path / "runs/exp"
    printed = capsys.readouterr().out
    for word in ("class", "all", *NAMES, "AP by size", "ms per image"):
        assert word in printed
    results = read(folder, "results")
    assert results["images"] == 7
    assert [c["instances"] for c in results["classes"]] == [sum(c) for c in zip(*results["confusion"]["counts"])][:2]
    assert results["confusion"]["confidence"] == results["best_confidence"] or not results["f1"]
    assert results["settings"]["imgsz"] == SIZE
    rows = read_csv(folder / "classes.csv")
    assert [r["class"] for r in rows] == ["all", *NAMES]
    assert float(rows[0]["AP"]) == results["ap"]
    figures = [f"{name}.png" for name in ("PR_curve", "F1_curve", "P_curve", "R_curve", "confusion_matrix", "errors")]
    assert all(cv2.imread(str(folder / name)) is not None for name in (*figures, "predictions.jpg"))
    assert len(read_csv(folder / "sizes.csv")) == len(results["sizes"]["rows"]) == 4 * (1 + len(NAMES))
    index = load_index(
        load_dataset_spec(tiny[0]), "val", IndexSettings(cache_dir=str(tmp_path / "cache"), progress=False)
    )
    stats, _ = coco_evaluate(index.ground_truth(), folder / "predictions.json")
    np.testing.assert_allclose([results[k] for k in ("ap", "ap50", "ap75")], stats[:3], atol=1e-4)


class OneBox(nn.Module):
    """An exported program of other people, which finds a disc in the middle of each image."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[[30.0], [20.0], [12.0], [12.0], [0.9], [0.0]]])


def test_a_foreign_file_may_take_images_whose_sides_are_no_multiples_of_the_stride(tiny, tmp_path, capsys):
    height, width = 40, 60
    metadata = {"names": dict(enumerate(NAMES)), "imgsz": [height, width]}
    with quiet():
        program = torch.jit.trace(OneBox(), torch.zeros(1, 3, height, width))
        torch.jit.save(program, tmp_path / "a.torchscript", _extra_files={"config.txt": json.dumps(metadata)})
    given = ["--weights", tmp_path / "a.torchscript", "--trust", "--data", tiny[0], "--noplots", "--save-json"]
    val.main(flags(tiny, tmp_path, *given))
    boxes = {row["image_id"]: row["bbox"] for row in read(tmp_path / "runs/exp")}
    assert len(boxes) == 7
    side = 12 * 48 / height  # of the box, in an image that is 64 wide and 48 high
    assert boxes[0] == pytest.approx([32 - side / 2, 24 - side / 2, side, side], abs=0.5)
    assert "takes 40x60 pixels" in error_of(capsys, val.main, *flags(tiny, tmp_path, *given, "--imgsz", "64"))


class FixedBoxes(nn.Module):
    """An exported program of other people, with the same detections in each image.

    Classes 0 and 1 are found, 0 also as 1, by a box that fits better; 2 only below all wrong detections.
    """

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        wrong = [[8.0 + 14 * i, 56.0, 8.0, 8.0, 0.1, float(c), 1.0 - c, 0.0] for i in range(4) for c in (0, 1)]
        rows = [
            [14.0, 16.0, 16.0, 16.0, 0.9, 0.9, 0.0, 0.0],
            [12.0, 16.0, 16.0, 16.0, 0.9, 0.0, 0.9, 0.0],
            [32.0, 32.0, 16.0, 16.0, 0.9, 0.0, 0.9, 0.0],
            [52.0, 16.0, 16.0, 16.0, 0.05, 0.0, 0.0, 0.05],
            *wrong,
        ]
        boxes = [[x - w / 2, y - h / 2, x + w / 2, y + h / 2, s, float(np.argmax(scores))]
                 for x, y, w, h, s, *scores in rows]  # fmt: skip
        return torch.tensor([boxes])


def test_one_matching_gives_precision_recall_and_the_matrix_of_the_same_classes(tmp_path, capsys):
    """The threshold is the best one, or that of ``--conf-thres``."""
    images, size, names = 3, 64, ["a", "b", "c"]
    for kind in ("images", "labels"):
        (tmp_path / kind / "val").mkdir(parents=True)
    for i in range(images):
        cv2.imwrite(str(tmp_path / f"images/val/{i}.png"), np.full((size, size, 3), 40 * i, np.uint8))
        rows = [f"{c} {x / size} {y / size} 0.25 0.25" for c, (x, y) in enumerate([(12, 16), (32, 32), (52, 16)])]
        (tmp_path / f"labels/val/{i}.txt").write_text("\n".join(rows))
    data = tmp_path / "data.yaml"
    data.write_text(yaml.safe_dump({"path": ".", "val": "images/val", "names": names}))
    weights = tmp_path / "fixed.torchscript"
    metadata = {"names": dict(enumerate(names)), "imgsz": [size, size], "end2end": True}
    with quiet():
        program = torch.jit.trace(FixedBoxes(), torch.zeros(1, 3, size, size))
        torch.jit.save(program, weights, _extra_files={"config.txt": json.dumps(metadata)})
    val.main(flags((data, weights), tmp_path, "--trust", "--data", data, "--noplots"))
    folder = tmp_path / "runs/exp"
    rows = read_csv(folder / "classes.csv")
    assert [row["R"] for row in rows[1:]] == ["1.0", "1.0", "0.0"]
    assert [row["P"] for row in rows] == ["0.5", "1.0", "0.5", "0.0"]  # c has no detection
    results = read(folder, "results")
    assert results["precision"] == 0.5
    assert [row["P"] for row in results["classes"]] == [1, 0.5, 0]
    counts = np.array(results["confusion"]["counts"])
    assert (counts.diagonal() / np.maximum(counts.sum(0), 1)).tolist() == [1, 1, 0, 0]  # recall
    assert counts.sum(1).tolist() == [images, 2 * images, 0, images]  # detections; objects that are not found
    assert "--conf-thres" not in capsys.readouterr().out
    chosen = ["--conf-thres", "0.07", "--name", "chosen", "--noplots"]  # above it, four more of a and b are wrong
    val.main(flags((data, weights), tmp_path, "--trust", "--data", data, *chosen))
    results = read(tmp_path / "runs/chosen", "results")
    assert [row["P"] for row in results["classes"]] == pytest.approx([1 / 5, 1 / 6, 0])
    assert [row["R"] for row in results["classes"]] == [1, 1, 0]
    assert results["f1"] == pytest.approx((2 / 6 + 2 / 7) / 3)
    assert results["confusion"]["confidence"] == 0.07
    assert np.sum(results["confusion"]["counts"], 1).tolist() == [5 * images, 6 * images, 0, images]
    assert "AP counts only detections above --conf-thres 0.07" in capsys.readouterr().out
