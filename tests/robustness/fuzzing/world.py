"""The valid files that the fuzzer changes, each made once."""

from __future__ import annotations

import resource
import shutil
import struct
from functools import cached_property
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

import train
from data.dataset.yaml_file import load_dataset_spec
from data.index.index import DatasetIndex, IndexSettings
from data.index.load import load_index
from tests.helpers.repository import ROOT
from tests.helpers.scripts import SMALL, call
from tests.helpers.synthetic_index import open_cache
from tests.helpers.three_formats import write_three_formats
from tests.helpers.tiny import write_model
from tests.robustness.fuzzing.labels import NAMES, OBJECTS, SIZES
from tools.weights.convert_weights import convert as convert_weights
from utils.files.torch_file import read_checkpoint, read_safetensors, write_safetensors

MEMORY = 6 << 30  # bytes that a process may take


def limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class World:
    """Valid files below ``folder``. What targets need is made before the processes that try inputs are forked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def pictures(self) -> dict[str, bytes]:
        """An image of each kind that is read, by file name."""
        rng = np.random.default_rng(0)
        small = rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)
        photo = cv2.resize(small, (160, 112), interpolation=cv2.INTER_CUBIC)
        large = cv2.resize(rng.integers(0, 256, (60, 80, 3), dtype=np.uint8), (400, 300))

        def encoded(suffix: str, image: np.ndarray, *options: int) -> bytes:
            return cv2.imencode(suffix, image, list(options))[1].tobytes()

        jpeg = encoded(".jpg", photo)
        tiff_header = b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"
        exif = b"Exif\0\0" + tiff_header
        turned = jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + jpeg[2:]
        return {
            "photo.jpg": jpeg,
            "large.jpg": encoded(".jpg", large),
            "progressive.jpg": encoded(".jpg", photo, cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
            "restarts.jpg": encoded(".jpg", photo, cv2.IMWRITE_JPEG_RST_INTERVAL, 4),
            "gray.jpg": encoded(".jpg", photo[..., 0]),
            "turned.jpg": turned,
            "color.png": encoded(".png", photo),
            "noise.png": encoded(".png", rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)),
            "deep.png": encoded(".png", photo.astype(np.uint16) * 257),
            "alpha.png": encoded(".png", np.dstack([photo, photo[..., :1]])),
            "lossy.webp": encoded(".webp", photo, cv2.IMWRITE_WEBP_QUALITY, 80),
            "exact.webp": encoded(".webp", photo, cv2.IMWRITE_WEBP_QUALITY, 101),
            "plain.bmp": encoded(".bmp", photo),
            "packed.tif": encoded(".tif", photo),
            "deep.tif": encoded(".tif", photo.astype(np.uint16) * 257),
            "plain.ppm": encoded(".ppm", photo),
            "gray.pgm": encoded(".pgm", photo[..., 0]),
            "wavelets.jp2": encoded(".jp2", photo),
        }

    @cached_property
    def labeled(self) -> Path:
        """A data set of four images with YOLO txt, VOC XML and COCO JSON, a model and hyper-parameters."""
        root = self.folder / "labeled"
        write_three_formats(root, NAMES, SIZES, OBJECTS)
        for name, more in (("yolo", ""), ("voc", "annotations: voc\n"), ("coco", "annotations: instances.json\n")):
            text = f"path: .\ntrain: images/train\nval: images/train\nnc: 2\nnames: [light, dark]\n{more}"
            (root / f"{name}.yaml").write_text(text)
        (root / "list.txt").write_text("".join(f"images/train/{name}\n" for name in SIZES))
        (root / "list.yaml").write_text("train: list.txt\nval: images/train\nnames: [light, dark]\n")
        write_model(root / "tiny.yaml")
        shutil.copy(ROOT / "configs" / "hyp" / "scratch.yaml", root / "hyp.yaml")
        return root

    @cached_property
    def trained(self) -> Path:
        """A data set with the run of one epoch in ``runs/exp``."""
        root = shutil.copytree(self.labeled, self.folder / "trained")
        flags = ["--data", root / "yolo.yaml", "--model", root / "tiny.yaml", "--epochs", "1", *SMALL]
        flags += ["--project", root / "runs", "--cache-dir", self.folder / "trained.cache", "--optimizer", "SGD"]
        call(train.main, *flags)
        return root

    @cached_property
    def checkpoints(self) -> dict[str, bytes]:
        """The last and best checkpoint of the run, and one of another program."""
        run = self.trained / "runs" / "exp"
        content = read_checkpoint(run / "last.pt")
        weights = {f"model.{key}": value for key, value in content["model"].items()}
        path = self.folder / "foreign.pt"
        torch.save({"model": weights, "names": list(NAMES), "epoch": 3}, path)
        return {p.name: p.read_bytes() for p in (run / "last.pt", run / "best.pt", path)}

    @cached_property
    def last(self) -> dict[str, Any]:
        return read_checkpoint(self.trained / "runs" / "exp" / "last.pt")

    @cached_property
    def safetensors(self) -> dict[str, bytes]:
        own = self.folder / "own.safetensors"
        other = self.folder / "other.safetensors"
        convert_weights(str(self.trained / "runs" / "exp" / "best.pt"), own)
        write_safetensors(other, read_safetensors(own)[0], {"format": "pt"})
        return {path.name: path.read_bytes() for path in (own, other)}

    @cached_property
    def index_cache(self) -> tuple[Path, Path, DatasetIndex]:
        """A data set with a label file that cannot be used, its cache with reports, and its index."""
        root = shutil.copytree(self.labeled, self.folder / "indexed")
        cache = self.folder / "indexed.cache"
        (root / "labels/train/b.txt").write_text("0 0.5 0.5 0.2 0.2\nnonsense\n")
        index = scan(root, "yolo", cache)
        assert {p.suffix for p in cache.iterdir()} == {".index", ".txt"}
        return root, cache, index

    @cached_property
    def image_cache(self) -> tuple[DatasetIndex, list[Path], list[np.ndarray]]:
        """The index, the files of its disk cache, and the pixels."""
        folder = self.folder / "pixels.cache"
        index = scan(self.labeled, "yolo", folder)
        pixels = cached_pixels(index, folder)
        (path,) = folder.glob("*.lmdb")
        return index, [path, path.with_suffix(".complete")], pixels


def scan(root: Path, kind: str, cache: Path) -> DatasetIndex:
    spec = load_dataset_spec(root / f"{kind}.yaml")
    return load_index(spec, "train", IndexSettings(cache_dir=str(cache), workers=0, progress=False, max_bad=1.0))


def cached_pixels(index: DatasetIndex, folder: Path) -> list[np.ndarray]:
    cache = open_cache("disk", index, 64, folder)
    return [np.array(cache[i]) for i in range(len(index))]
