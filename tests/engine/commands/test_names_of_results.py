"""detect.py warns of images whose results have another name."""

from __future__ import annotations

import cv2
import numpy as np

from engine.commands.detect import detect
from tests.helpers.tiny import write_weights
from utils.config.settings import DetectConfig


def test_files_that_share_a_name_are_named_in_the_log(tmp_path, capsys):
    for name in ("x/a.png", "y/a.png", "y/b.png"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), np.zeros((32, 32, 3), np.uint8))
    config = DetectConfig(
        weights=str(write_weights(tmp_path / "best.pt", ("disc",))),
        source=f"{tmp_path}/in/**/*",
        project=str(tmp_path / "runs"),
        device="cpu",
        save_txt=True,
        nosave=True,
    )
    folder = detect(config)
    assert folder is not None
    assert sorted(path.name for path in folder.glob("labels/*")) == ["a-2.txt", "a.txt", "b.txt"]
    printed = capsys.readouterr().out
    assert "the results of 1 file have another name, because another file has the same one" in printed
    assert f"the first: {tmp_path}/in/y/a.png -> a-2\n" in printed
