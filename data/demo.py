"""The demo data set, which is rendered on demand. The same arguments give the same bytes.

``python -m data.demo OUT`` writes it to a folder.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np

from data.demo_scene import CLASS_NAMES, render_scene
from utils.errors import UserError
from utils.logger import configure_logging, progress
from utils.machine.resources import available_cores
from utils.rng import Stream, keyed_generator

VERSION = 2  # increase it when the images change; then older copies are rendered again
MARKER = "demo.json"
YAML_NAME = "data.yaml"
SPLITS = ("train", "val")


def ensure_demo(root: Path, *, train_images: int = 320, val_images: int = 80, size: int = 320, seed: int = 0) -> Path:
    """Renders the demo set into ``root`` unless a complete set with these arguments is there already.

    It is written beside ``root`` and renamed, so ``root`` never holds an incomplete set. Images have ``size`` x
    ``size`` pixels.

    Returns:
        the path of its YAML.

    Raises:
        UserError: ``root`` holds something else, or cannot be written.
    """
    root = Path(os.path.expanduser(root))
    wanted = {"version": VERSION, "train": train_images, "val": val_images, "size": size, "seed": seed}
    if _is_complete(root, wanted):
        return root / YAML_NAME
    if root.exists() and not (root / MARKER).exists() and (not root.is_dir() or any(root.iterdir())):
        raise UserError(f"{root}: exists and is not a demo data set; choose an empty or new folder")
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{root.name}-", dir=root.parent) as scratch:
            fresh = Path(scratch) / "fresh"
            _write_set(fresh, wanted)
            _swap_in(fresh, root, Path(scratch) / "old", wanted)
    except OSError as error:
        raise UserError(f"{root}: cannot write the demo data set ({error.strerror or error})") from None
    return root / YAML_NAME


def _is_complete(root: Path, wanted: dict[str, int]) -> bool:
    try:
        found = json.loads((root / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if found != wanted or not (root / YAML_NAME).is_file():
        return False
    folders = [(root / kind / split, wanted[split]) for kind in ("images", "labels") for split in SPLITS]
    return all(folder.is_dir() and len(os.listdir(folder)) >= count for folder, count in folders)


def _swap_in(fresh: Path, root: Path, old: Path, wanted: dict[str, int]) -> None:
    """Renames ``fresh`` to ``root``. If two processes do this at the same time, both succeed."""
    if root.exists():
        if _is_complete(root, wanted):
            return
        root.rename(old)
    try:
        fresh.rename(root)
    except OSError:
        if not _is_complete(root, wanted):
            raise


def _write_set(folder: Path, wanted: dict[str, int]) -> None:
    for kind in ("images", "labels"):
        for split in SPLITS:
            (folder / kind / split).mkdir(parents=True)
    jobs = [(split, number) for split in SPLITS for number in range(wanted[split])]
    with ThreadPoolExecutor(max_workers=min(available_cores(), 8)) as pool:  # OpenCV and numpy release the GIL
        done = pool.map(lambda job: _write_image(folder, wanted, *job), jobs)
        for _ in progress(done, desc="rendering the demo set", total=len(jobs)):
            pass
    names = "".join(f"  {i}: {name}\n" for i, name in enumerate(CLASS_NAMES))
    yaml_text = f"# Rendered by python -m data.demo\npath: .\ntrain: images/train\nval: images/val\nnames:\n{names}"
    (folder / YAML_NAME).write_text(yaml_text, encoding="utf-8")
    (folder / MARKER).write_text(json.dumps(wanted), encoding="utf-8")


def demo_image(split: str, number: int, *, size: int = 320, seed: int = 0) -> tuple[np.ndarray, np.ndarray, int]:
    """Image ``number`` of a split, which depends only on the arguments.

    Returns:
        image uint8 (size, size, 3) RGB; labels float64 (n, 5) of class, cx, cy, w, h normalized; JPEG quality.
    """
    rng = keyed_generator(seed, Stream.DEMO, SPLITS.index(split), number)
    image, labels = render_scene(rng, size)
    return image, labels, int(rng.integers(75, 96))


def _write_image(folder: Path, wanted: dict[str, int], split: str, number: int) -> None:
    image, labels, quality = demo_image(split, number, size=wanted["size"], seed=wanted["seed"])
    ok, encoded = cv2.imencode(".jpg", image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])
    if not ok:
        raise OSError("JPEG encoding failed")
    rows = "".join("{:.0f} {:.6f} {:.6f} {:.6f} {:.6f}\n".format(*row) for row in labels)
    (folder / "images" / split / f"{number:05d}.jpg").write_bytes(encoded.tobytes())
    (folder / "labels" / split / f"{number:05d}.txt").write_text(rows, encoding="ascii")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data.demo", description="Writes the demo data set to a folder.")
    parser.add_argument("out", metavar="OUT", type=Path, help="an empty or new folder")
    options = parser.parse_args(argv)
    configure_logging(True)
    print(ensure_demo(options.out))


if __name__ == "__main__":
    from utils.entrypoint import run_main

    run_main(main)
