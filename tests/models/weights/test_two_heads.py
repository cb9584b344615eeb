"""Weights of models with one and with two heads, transferred to each other."""

from __future__ import annotations

import torch

from models.detector import build_detector
from models.heads.base import ONE_TO_ONE
from models.weights.transfer import transfer_weights
from tests.helpers.tiny import TINY_MODEL, write_detector


def test_weights_of_a_single_head_initialize_both_heads(tmp_path) -> None:
    single = build_detector(TINY_MODEL, 2, names=["light", "dark"], seed=1)
    write_detector(tmp_path / "single.pt", single)
    pair = build_detector(TINY_MODEL | {"end2end": True}, 2, names=["dark", "new"], seed=2)
    fresh = {key: value.clone() for key, value in pair.state_dict().items()}
    report = transfer_weights(pair, tmp_path / "single.pt")
    assert not report.skipped
    assert not report.unused
    state = pair.state_dict()
    source = single.state_dict()
    head = f"model.{len(single.model) - 1}."
    for prefix in ("", ONE_TO_ONE):
        assert torch.equal(state[f"{head}{prefix}cv2.0.0.conv.weight"], source[f"{head}cv2.0.0.conv.weight"])
        rows = f"{head}{prefix}cv3.1.2.weight"
        assert torch.equal(state[rows][0], source[f"{head}cv3.1.2.weight"][1])
        assert torch.equal(state[rows][1], fresh[rows][1])
    write_detector(tmp_path / "pair.pt", pair, names=["light", "dark"])
    back = build_detector(TINY_MODEL, 2, names=["light", "dark"], seed=3)
    report = transfer_weights(back, tmp_path / "pair.pt")
    assert not report.skipped
    assert {name.split(".")[2] for name in report.unused} == {f"{ONE_TO_ONE}cv2", f"{ONE_TO_ONE}cv3"}
