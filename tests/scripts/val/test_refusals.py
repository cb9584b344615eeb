"""Mistakes in the flags of val.py are one line."""

from __future__ import annotations

import pytest

import val
from tests.helpers.messages import refused
from tests.scripts.val.validation import flags


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--imgsz", "65"], "--imgsz 65: not a multiple of the model's stride 32; use 64 or 96"),
        (["--weights", "absent.pt"], "absent.pt: neither a file nor the name of public weights; ..."),
        (["--data", "absent.yaml"], "data set absent.yaml: no such file; ..."),
        (["--task", "test"], "data.yaml: has no 'test' split, only val; ..."),
        (["--conf", "2"], "--conf-thres: must be at most 1, got 2"),
        (
            ["--weights", "a.onnx", "--tta"],
            "a.onnx: --tta: only checkpoints are evaluated with several views; leave it out",
        ),
        (["--weights", "a.onnx", "--amp", "bf16"], "a.onnx: cannot be opened (...)"),  # before the file is opened
    ],
)
def test_mistakes_are_user_errors(tiny, tmp_path, more, message):
    if "opened" in message:
        pytest.importorskip("onnxruntime")
    (tmp_path / "a.onnx").touch()
    with refused(message):
        val.main(flags(tiny, tmp_path, *more))
    assert not (tmp_path / "runs").exists()
