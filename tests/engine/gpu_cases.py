"""Models and a context of one process for tests on a fake GPU."""

from __future__ import annotations

import numpy as np
import torch

from tests.helpers.tiny import TINY_ANCHOR_MODEL, TINY_MODEL
from utils.distributed.context import DistributedContext

CUDA = torch.device("cuda", 0)
ALONE = DistributedContext(
    rank=0, local_rank=-1, world_size=1, local_world_size=1, device=CUDA, backend="", devices=(CUDA,)
)
# TINY_MODEL with blocks and the head of each family.
MODELS = {
    "yolov8": TINY_MODEL,
    "yolov5": TINY_ANCHOR_MODEL,
    "yolo26": {
        **TINY_MODEL,
        "end2end": True,
        "reg_max": 1,
        "head": [[4, 1, "C3k2", [32, True, 0.5, True]], [[2, 3, 5], 1, "Detect", ["nc"]]],
    },
    "yolox": {**TINY_MODEL, "head": [[[2, 3, 4], 1, "YOLOXDetect", ["nc", 16]]]},
    "yolov9": {
        **TINY_MODEL,
        "head": [[2, 1, "RepNCSPELAN4", [16, 16, 8, 1]], [-1, 1, "ADown", [16]], [[5, 6, 4], 1, "Detect", ["nc"]]],
    },
}
IGNORE = np.float32([[1, -1, 0.5, 0.5, 0.2, 0.2], [1, 0, 0.3, 0.3, 0.1, 0.2]])
