"""--weights in the scripts: hostile files end with one line and run no code, names need the network, and the weights
determine the model.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from pathlib import Path

import cv2
import numpy as np
import pytest

import detect
import train
import val
from engine.inference.predict import load
from tests.helpers.hostile_files import Touch, zip_around
from tests.helpers.preloaded import python
from tests.helpers.repository import ROOT
from tests.helpers.scripts import SMALL, error_of
from tests.helpers.tiny import write_dataset, write_weights
from tools.weights import __main__ as weights_command


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A tiny data set, an own checkpoint with its classes."""
    root = tmp_path_factory.mktemp("inputs")
    write_dataset(root / "set", train=8, val=3)
    write_weights(root / "own.pt", ["light", "dark"], seed=3)
    return root


def commands(inputs: Path, weights: Path | str, out: Path) -> dict[str, tuple]:
    data = str(inputs / "set" / "data.yaml")
    return {
        "train": (train.main, "--data", data, "--weights", weights, "--project", out, *SMALL),
        "val": (val.main, "--data", data, "--weights", weights, "--project", out, "--device", "cpu", "--workers", "0"),
        "detect": (detect.main, "--source", inputs / "set" / "images" / "val", "--weights", weights, "--project", out),
        "weights": (weights_command.main, weights, out / "converted.safetensors"),
    }


def test_a_hostile_and_a_truncated_file_are_refused_in_one_line_by_every_script(inputs, tmp_path, capsys):
    marker = tmp_path / "ran"
    program = pickle.dumps({"model": Touch((os.system, (f"touch '{marker}'",)))}, 2)
    truncated = tmp_path / "truncated.pt"
    truncated.write_bytes((inputs / "own.pt").read_bytes()[:-300])
    for path in (zip_around(program, tmp_path / "runs.pt"), truncated):
        for name, command in commands(inputs, path, tmp_path / "out").items():
            assert error_of(capsys, *command).startswith(f"error: {path}: "), name
    assert not marker.exists()
    assert not list((tmp_path / "out").rglob("*.pt"))


def test_an_uncached_name_with_offline_is_one_line(inputs, tmp_path, capsys):
    """It says what to put where."""
    for command in commands(inputs, "yolo26n", tmp_path).values():
        line = error_of(capsys, *command, "--offline")
        assert "put https://github.com/" in line
        assert line.endswith("lockstep/weights/yolo26n.pt")


SCRIPT = """
import json, sys
import torch
root, weights, image = sys.argv[1:4]
import models  # the user's own
try:
    torch.hub.load(root, "custom", path=weights, source="local", device="cpu")
except ImportError as error:
    print(json.dumps(str(error)))
assert models.mine
del sys.modules["models"]
model = torch.hub.load(root, "custom", weights, source="local", device="cpu", conf=0.0, max_det=4)
(result,) = model(image, imgsz=64)
print(json.dumps(result.boxes.data.tolist()))
model = torch.hub.load(root, "custom", weights, True, False, "cpu", source="local")  # as YOLOv5's programs may
model.conf, model.max_det = 0.0, 4
print(json.dumps(model(image, size=64).xyxy[0].tolist()))
named = torch.hub.load(root, "yolov8n", source="local", device="cpu")
print(json.dumps(named.names))
for missing in ("yolov8nn", "Path"):
    try:
        torch.hub.load(root, missing, source="local")
    except RuntimeError as error:
        print(json.dumps(str(error)))
"""


def test_torch_hub_load_from_another_folder(tmp_path):
    """The working folder has modules named utils and models, of which the second is imported already at first."""
    weights = write_weights(tmp_path / "best.pt", ("disc", "ring"))
    (tmp_path / "utils.py").write_text("raise AssertionError('the wrong utils')\n")
    (tmp_path / "models.py").write_text("mine = True\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    noise = np.random.default_rng(0).integers(0, 255, (48, 64, 3)).astype(np.uint8)
    cv2.imwrite(str(tmp_path / "a.png"), noise)
    cache = tmp_path / "cache"
    (cache / "lockstep" / "weights").mkdir(parents=True)
    (cache / "lockstep" / "weights" / "yolov8n.pt").write_bytes(weights.read_bytes())  # no download
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(
        [python(), "script.py", ROOT, weights, "a.png"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    clash, boxes, boxes_of_yolov5, names, *missing = map(json.loads, done.stdout.splitlines())
    assert clash.startswith(f"a module named models is already imported from {tmp_path}/models.py, but {ROOT} has a")
    assert "\n" not in clash
    assert boxes == load(weights, device="cpu", conf=0.0, max_det=4)(tmp_path / "a.png")[0].boxes.data.tolist()
    assert boxes_of_yolov5 == boxes
    assert names == {"0": "disc", "1": "ring"}
    assert missing == ["Cannot find callable yolov8nn in hubconf", "Cannot find callable Path in hubconf"]
