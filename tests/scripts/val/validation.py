"""A small rendered data set, and the flags and files of val.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import yaml

NAMES = ("disc", "box")
SIZE = 64


def render_set(folder: Path, images: int = 7) -> Path:
    """Renders images of several aspect ratios, each with a few shapes; the last has none. Returns their YAML."""
    rng = np.random.default_rng(0)
    (folder / "images/val").mkdir(parents=True)
    (folder / "labels/val").mkdir(parents=True)
    for i in range(images):
        height, width = ((48, 64), (64, 48), (64, 64))[i % 3]
        picture = rng.integers(0, 60, (height, width, 3)).astype(np.uint8)
        lines = []
        for _ in range(3 if i < images - 1 else 0):
            kind = int(rng.integers(2))
            half = int(rng.integers(4, 10))
            x, y = (int(rng.integers(half, side - half)) for side in (width, height))
            if kind:
                cv2.rectangle(picture, (x - half, y - half), (x + half, y + half), (200, 220, 240), -1)
            else:
                cv2.circle(picture, (x, y), half, (240, 120, 90), -1)
            lines.append(f"{kind} {x / width} {y / height} {2 * half / width} {2 * half / height}")
        cv2.imwrite(str(folder / f"images/val/{i:03}.png"), picture)
        (folder / f"labels/val/{i:03}.txt").write_text("\n".join(lines))
    (folder / "data.yaml").write_text(yaml.safe_dump({"path": ".", "val": "images/val", "names": list(NAMES)}))
    return folder / "data.yaml"


def flags(tiny: tuple[Path, Path], tmp_path: Path, *more: object) -> list[str]:
    base = {"--weights": tiny[1], "--device": "cpu", "--batch-size": 2, "--workers": 0, "--project": tmp_path / "runs"}
    base |= {"--cache-dir": tmp_path / "cache"}
    return [str(word) for pair in base.items() for word in pair] + list(map(str, more))


def read(folder: Path, name: str = "predictions") -> Any:
    return json.loads((folder / f"{name}.json").read_text())


def lasting(folder: Path) -> dict[str, Any]:
    """Returns results.json without times and the machine, which differ between runs."""
    results = read(folder, "results")
    for key in ("project", "name", "spawn"):
        del results["settings"][key]
    return {**results, "extras": None}
