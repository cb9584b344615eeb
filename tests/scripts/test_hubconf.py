"""torch.hub.load from this folder."""

from __future__ import annotations

import json
import os
import subprocess

import cv2
import numpy as np

from engine.inference.predictor import load
from tests.helpers.preloaded import python
from tests.helpers.repository import ROOT
from tests.helpers.tiny import write_weights

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
