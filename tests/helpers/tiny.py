"""A detector and a data set small enough for end-to-end tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import torch
import yaml
from torch import Tensor, nn

from models.detector import Detector, build_detector
from tests.helpers.synthetic_index import smooth_image
from utils.batches import Batch, Targets
from utils.files.torch_file import write_checkpoint

# Three levels (strides 8, 16, 32), about 60 thousand parameters.
TINY_MODEL = {
    "nc": 2,
    "backbone": [
        [-1, 1, "Conv", [8, 3, 2]],
        [-1, 1, "Conv", [16, 3, 2]],
        [-1, 1, "Conv", [16, 3, 2]],
        [-1, 1, "Conv", [32, 3, 2]],
        [-1, 1, "Conv", [32, 3, 2]],
    ],
    "head": [[[2, 3, 4], 1, "Detect", ["nc"]]],
}
TINY_ANCHOR_MODEL = {
    **TINY_MODEL,
    "anchors": [[10, 13, 16, 30, 33, 23], [30, 61, 62, 45, 59, 119], [116, 90, 156, 198, 373, 326]],
    "head": [[[2, 3, 4], 1, "Detect", ["nc", "anchors"]]],
}


def write_model(path: Path, model: dict = TINY_MODEL) -> Path:
    path.write_text(yaml.safe_dump(model), encoding="utf-8")
    return path


def write_detector(path: Path, detector: Detector, **content: object) -> Path:
    """Writes a checkpoint of ``detector``."""
    stored = {"model_spec": detector.spec, "names": list(detector.names), "imgsz": 64, "config": {}, "hyp": {}}
    write_checkpoint({**stored, "model": {}, "ema": detector.state_dict(), **content}, path)
    return path


def write_weights(path: Path, names: Sequence[str], *, imgsz: int = 64, seed: int = 1) -> Path:
    """Writes a checkpoint of the untrained tiny model."""
    return write_detector(path, build_detector(TINY_MODEL, len(names), names=names, seed=seed), imgsz=imgsz)


def write_dataset(root: Path, *, train: int = 10, val: int = 5, size: int = 64) -> Path:
    """Writes images of bright squares (class 0) and dark ones (class 1) on noise, with YOLO txt. Returns the YAML."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for kind in ("images", "labels"):
            (root / kind / split).mkdir(parents=True)
        for number in range(count):
            image = rng.integers(90, 160, (size, size, 3), dtype=np.uint8)
            rows = []
            for _ in range(int(rng.integers(0 if number % 5 == 4 else 1, 4))):
                side = int(rng.integers(size // 6, size // 2))
                x, y = (int(v) for v in rng.integers(0, size - side, 2))
                label = int(rng.integers(2))
                image[y : y + side, x : x + side] = 20 if label else 235
                rows.append(f"{label} {(x + side / 2) / size} {(y + side / 2) / size} {side / size} {side / size}\n")
            cv2.imwrite(str(root / "images" / split / f"{number:03}.png"), image)
            (root / "labels" / split / f"{number:03}.txt").write_text("".join(rows))
    path = root / "data.yaml"
    path.write_text(yaml.safe_dump({"train": "images/train", "val": "images/val", "names": ["light", "dark"]}))
    return path


def write_tiled_dataset(root: Path, sizes_hw: Sequence[tuple[int, int]], *, tile: int, squares: int, seed: int) -> Path:
    """Writes smooth images of ``sizes_hw`` with ``squares`` red squares of 30 px on each, in both splits, and a YAML
    with ``tile``. Returns the YAML."""
    rng = np.random.default_rng(seed)
    for split in ("train", "val"):
        for kind in ("images", "labels"):
            (root / kind / split).mkdir(parents=True)
        for i, (height, width) in enumerate(sizes_hw):
            image = smooth_image(rng, height, width)
            rows = ""
            for _ in range(squares):
                x, y = int(rng.integers(width - 30)), int(rng.integers(height - 30))
                image[y : y + 30, x : x + 30] = (250, 20, 20)
                rows += f"0 {(x + 15) / width} {(y + 15) / height} {30 / width} {30 / height}\n"
            cv2.imwrite(str(root / f"images/{split}/{i}.png"), image[..., ::-1])
            (root / f"labels/{split}/{i}.txt").write_text(rows)
    path = root / "data.yaml"
    path.write_text(f"train: images/train\nval: images/val\nnames: [red]\ntile: {tile}\n")
    return path


def make_batch(images: int, *, size: int = 64, seed: int = 0, targets_per_image: int = 2) -> Batch:
    """Returns a batch of random images. The targets of image i depend only on ``seed`` and i; ``targets_per_image`` may
    be 0."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (images, size, size, 3), generator=generator, dtype=torch.uint8).permute(0, 3, 1, 2)
    boxes = torch.rand(images, targets_per_image, 4, generator=generator) * 0.3 + torch.tensor([0.3, 0.3, 0.2, 0.2])
    classes = torch.randint(0, 2, (images, targets_per_image, 1), generator=generator).float()
    number = torch.arange(images).float()[:, None, None].expand(-1, targets_per_image, 1)
    rows = torch.cat([number, classes, boxes], -1).reshape(-1, 6).clone()  # no view: `collate` makes none, either
    return Batch(
        images=pixels,
        targets=Targets(rows, (targets_per_image,) * images),
        indices=torch.arange(images),
        original_hw=torch.full((images, 2), size, dtype=torch.int32),
        letterbox=torch.tensor([[1.0, 1.0, 0.0, 0.0]]).expand(images, 4).clone(),
        paths=tuple(f"image{i}.png" for i in range(images)),
    )


def as_targets(rows: Tensor, ignore: np.ndarray | None = None) -> Targets:
    """Creates `Targets` from rows (M, 6) and ignore regions (R, 6)."""
    return Targets(rows, tuple(np.bincount(rows[:, 0].numpy().astype(int)).tolist()), ignore)


def randomize_batch_norms(detector: nn.Module) -> None:
    """Gives batch norms random statistics and weights, as if the detector had been trained."""
    generator = torch.Generator().manual_seed(0)
    for norm in (m for m in detector.modules() if isinstance(m, nn.BatchNorm2d)):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.normal_(0, 0.2, generator=generator)
        norm.running_var.uniform_(0.5, 2, generator=generator)
        nn.init.uniform_(norm.weight, 0.5, 1.5, generator=generator)
        nn.init.normal_(norm.bias, 0, 0.2, generator=generator)
