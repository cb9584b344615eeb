"""Checkpoints of other packages reproduce the outputs of these packages.

peers contains files with random weights, made with ``benchmarks/peer_checkpoints.py --compressible --classes 3 --size
64 96`` in the packages' own environments (ultralytics 8.4, yolox 0.3) and compressed with xz.
``benchmarks/peer_outputs.py`` does the same with more models.
"""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from benchmarks.peer_outputs import BOX_PX, RAW, SCORE, differences

PEERS = Path(__file__).with_name("peers")


@pytest.mark.parametrize(
    ("file", "model"),
    [
        ("yolo11n.pt", "yolo11n"),
        ("yolo26n.pt", "yolo26n"),
        ("yolov9t.pt", "yolov9t"),
        ("yolox-nano.pth", "yoloxnano"),
    ],
)
def test_a_peers_checkpoint_reproduces_the_peers_outputs(tmp_path: Path, file: str, model: str) -> None:
    (tmp_path / file).write_bytes(lzma.decompress((PEERS / f"{file}.xz").read_bytes()))
    name, classes, found = differences(tmp_path / file, (PEERS / file).with_suffix(".npz"))
    assert (name, classes) == (model, 3)
    assert found["boxes, px"] < BOX_PX
    assert found["scores"] < SCORE
    assert found["raw"] < RAW
