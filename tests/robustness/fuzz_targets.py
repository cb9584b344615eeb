"""The targets of the fuzzer, and the required outcome of each input.

A target makes a folder for each input, changes one file in it, and calls the program on it as its scripts do. What is
right is decided here, by other means: labels are parsed once more, strictly, by other code; a picture that is taken in
silence must be one of which OpenCV, asked directly, and Pillow have nothing to complain; caches must give what their
sources give; a checkpoint the tensors that were saved. Whatever else must end in one line that names the file.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import stat
import struct
import sys
import tempfile
import threading
import time
import traceback
import zipfile
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from xml.etree import ElementTree

import cv2
import numpy as np
import torch
import yaml

import detect
import train
import val
from data.box_sizes import warn_of_small_boxes
from data.cache import disk as disk_cache
from data.cache.open import open_image_cache
from data.check.census import take_census
from data.check.labels import box_pairs
from data.check.scanned import scan_dataset, scan_issues
from data.image_io.decode import read_bytes, read_image, read_source, reduced_sizes
from data.image_io.verify import check_image
from data.index.files import list_split
from data.index.index import DatasetIndex
from data.index.load import load_index
from data.labels.findings import NO_LABEL
from data.loading.damaged_images import DamagedImages
from data.spec.dataset_spec import DatasetSpec
from data.spec.dataset_yaml import load_dataset_spec
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.resume import resumed_config, resumed_hyperparameters, resumed_position
from engine.export.formats.onnx_file import write_onnx
from engine.export.formats.openvino_folder import build_openvino, write_openvino
from engine.export.formats.torch_files import write_pt2, write_torchscript
from engine.hooks.result_files import CsvTracker
from engine.inference.predictor import Predictor
from engine.inference.runtimes.backends import import_openvino, quiet
from engine.inference.runtimes.metadata import ExportMetadata
from engine.inference.runtimes.open import open_model
from engine.inference.runtimes.own_exports import is_own_export, record_export
from models.detector import build_on_meta
from models.spec import load_spec
from models.weights.load import load_detector
from models.weights.read import read_weights
from tests.helpers import yolo_lines
from tests.helpers.hostile_files import opcode_call, tensor_program, zip_around
from tests.helpers.same_content import same_content
from tests.helpers.tiny import write_model
from tests.robustness import fuzz_inputs
from tests.tools.convert.test_convert import SIZES as EXPORTED
from tests.tools.convert.test_convert import WRITERS
from tools.convert.__main__ import convert
from tools.shard import write_set
from tools.weights import convert as convert_weights
from utils.config.parser import read_recipe
from utils.config.settings import Hyperparameters, TrainConfig
from utils.drawing.plots import plot_curves
from utils.entrypoint import run_main
from utils.errors import UserError
from utils.files.checkpoint import read_checkpoint, read_safetensors
from utils.logger import get_logger
from utils.machine.limits import require_package
from utils.store import client
from utils.store.shards import fingerprint_of

MOST_CHARACTERS = 2000  # of a line
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = ("light", "dark")
STRINGS = ("", ".", "..", "a\0b", "\ud800", "../x", "/dev/zero", "a\nb", "x" * 300, "\x1b[2J", "train.shards", 5, None)
ANSWERS: tuple[Any, ...] = (  # a code, what the length is wrong by, or another header
    200, 204, 304, 400, 403, 404, 416, 429, 500, 503, 999,
    "0", "1", "-1", "1000000",
    *(("Content-Length", text) for text in ("0", "-1", "x", "99999999999", "18446744073709551615")),
    *(("Content-Range", f"bytes {text}") for text in ("0-0/1", "0-0/*", "5-1/9", "0-0/0", "0-9/99999999999", "x")),
    *(("ETag", text) for text in ("", "x", '"' + "x" * 9000 + '"', "\xff")),
    *(("Last-Modified", text) for text in ("", "x", "Fri, 31 Dec 9999 23:59:60 GMT", "Thu, 01 Jan 1970 00:00:00 GMT")),
    ("Content-Encoding", "gzip"), ("Transfer-Encoding", "chunked"), ("Location", "file:///etc/passwd"),
    ("X", "y" * 70000),
)  # fmt: skip
SMALL = ["--imgsz", "64", "--batch-size", "4", "--device", "cpu", "--workers", "0", "--amp", "off", "--noplots"]


class Case(NamedTuple):
    """One input."""

    chance: random.Random
    folder: Path  # empty, its own
    said: list[str]  # what the program has logged


class Refused(NamedTuple):
    """Raised with the line that the program would end with."""

    line: str

    def names(self, *files: Path | str) -> str:
        """Checks that the line names one of ``files``, and returns the verdict."""
        assert any(os.path.basename(f) in self.line for f in files), f"names no file: {self.line[:300]}"
        assert len(self.line) <= MOST_CHARACTERS, f"a line of {len(self.line)} characters: {self.line[:300]}"
        return "refused in a line"


def attempt(call: Callable[[], Any]) -> Any:
    """The result of ``call``, or the line of its UserError."""
    try:
        return call()
    except UserError as error:
        return Refused(" ".join(str(error).split()))


class Target:
    """A kind of file. ``prepare`` is called once, before the workers are forked."""

    name = ""
    deadline_s = 10.0
    weight = 1.0  # how often it is tried, relative to the others

    def prepare(self, seeds: Path) -> None:
        """Writes valid files below ``seeds``."""

    def run(self, case: Case) -> str:
        """Tries one input. Returns a short verdict; raises any exception for a finding."""
        raise NotImplementedError


# Pictures


def _pictures() -> dict[str, bytes]:
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


class Images(Target):
    """A changed image: refused by the scan, reported by name when it is used, or one whose change no decoder can
    notice."""

    name = "images"
    weight = 3.0

    def prepare(self, seeds: Path) -> None:
        self.pictures = _pictures()
        self.pixels = {name: _directly(data)[0] for name, data in self.pictures.items()}

    def run(self, case: Case) -> str:
        chance = case.chance
        name = chance.choice(list(self.pictures))
        same_kind = [d for n, d in self.pictures.items() if n != name and Path(n).suffix == Path(name).suffix]
        data, what = fuzz_inputs.change_bytes(self.pictures[name], chance, same_kind)
        if name.endswith(".png") and chance.random() < 0.4:
            data, what = _with_true_sums(data), f"{what}, CRCs put right"
        path = case.folder / name
        path.write_bytes(data)
        case.said.append(what)
        verdict = ""
        for decode in (False, True):
            size = attempt(lambda: check_image(path, decode=decode))  # noqa: B023 (called at once)
            if isinstance(size, Refused):
                verdict = verdict or size.names(path)
                continue
            complaints: list[str] = []
            image = attempt(lambda: read_image(path, lambda p, text: complaints.append(f"{p}: {text}")))  # noqa: B023
            source_hw = reduced_sizes(np.array([size]), 64)[0]
            source = attempt(lambda: read_source(str(path), np.array(size), source_hw, lambda *_: None))  # noqa: B023
            if decode:
                assert not isinstance(image, Refused), f"passes --verify full, then: {image}"
                assert not complaints, f"passes --verify full, then: {complaints}"
            if isinstance(image, Refused):
                verdict = image.names(path)
                continue
            assert image.shape == (*size, 3), f"the scan says {size}, the decoder {image.shape}"
            assert image.dtype == np.uint8
            assert not isinstance(source, Refused), source
            assert source.shape == (*source_hw, 3)
            if complaints:
                assert name in complaints[0]
                verdict = "complained of by name"
            else:
                verdict = self.check_silence(name, data, what, decode)
        return verdict

    def check_silence(self, name: str, data: bytes, what: str, is_decoded: bool) -> str:
        pixels, printed = _directly(data)
        assert pixels is not None, "OpenCV alone does not decode it"
        assert not re.search(r"Corrupt JPEG|Premature end|libpng error|(?i:error|truncated|corrupt)", printed), printed
        same = pixels.shape == self.pixels[name].shape and np.array_equal(pixels, self.pixels[name])
        if same:
            return "the same pixels"
        if data[:8] == b"\x89PNG\r\n\x1a\n":
            assert _with_true_sums(data) == data, "a wrong CRC in a PNG"
        if what == "truncate":
            raise AssertionError("truncated, and other pixels, in silence")
        # The scan detects damage of a decoded JPEG that OpenCV does not report, but not of JPEG 2000.
        problem = _strictly(data) if is_decoded and not name.endswith(".jp2") else ""
        assert not problem, f"Pillow refuses it: {problem}"
        return "other pixels that no decoder complains of"


def _directly(data: bytes) -> tuple[np.ndarray | None, str]:
    """What OpenCV decodes, and what it prints meanwhile."""
    with tempfile.TemporaryFile() as file, _descriptor(2, file.fileno()):
        try:
            image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED | cv2.IMREAD_IGNORE_ORIENTATION)
        except cv2.error:
            image = None
        file.seek(0)
        return image, file.read().decode("latin-1")


@contextlib.contextmanager
def _descriptor(number: int, other: int) -> Iterator[None]:
    kept = os.dup(number)
    os.dup2(other, number)
    try:
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)


def _strictly(data: bytes) -> str:
    """What Pillow, which may be missing, reports about an image; only what means missing or wrong data."""
    try:
        from PIL import Image
    except ImportError:
        return ""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data)) as image:
                image.load()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return text if re.search("truncated|broken data stream|not enough image data|bad checksum", text) else ""
    return ""


def _with_true_sums(data: bytes) -> bytes:
    """A PNG with the CRC of each chunk corrected; bytes outside of chunks do not change."""
    out, at = bytearray(data[:8]), 8
    while at + 12 <= len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        end = at + 8 + length
        if end + 4 > len(data):
            break
        out += data[at:end] + struct.pack(">I", zlib.crc32(data[at + 4 : end]))
        at = end + 4
    return bytes(out) + data[at:]


# Labels

SIZES = {"a.png": (60, 80), "b.png": (50, 40), "c.jpg": (64, 64), "d.png": (90, 120)}  # h, w
OBJECTS = {  # class, x1, y1, x2, y2 in pixels
    "a.png": [(0, 8, 6, 40, 30), (1, 0, 0, 80, 60)],
    "b.png": [(1, 10, 10, 20, 35)],
    "c.jpg": [(1, 16, 16, 32, 48), (0, 1, 2, 11, 12), (0, 30, 30, 60, 60)],
    "d.png": [(0, 60, 20, 110, 80)],
}


def write_labeled(root: Path) -> None:
    """A data set of four images with YOLO txt, VOC XML and COCO JSON."""
    images, labels, voc = root / "images" / "train", root / "labels" / "train", root / "voc"
    for folder in (images, labels, voc):
        folder.mkdir(parents=True)
    coco: dict[str, Any] = {"info": {"year": 2020}, "images": [], "annotations": []}
    coco["categories"] = [{"id": 10 * (c + 1), "name": name, "supercategory": "x"} for c, name in enumerate(NAMES)]
    for number, (name, (height, width)) in enumerate(SIZES.items(), 1):
        pixels = np.random.default_rng(number).integers(0, 255, (height, width, 3), np.uint8)
        (images / name).write_bytes(cv2.imencode(Path(name).suffix, pixels)[1].tobytes())
        coco["images"].append({"id": number, "file_name": name, "height": height, "width": width})
        rows, objects = [], []
        for c, x1, y1, x2, y2 in OBJECTS[name]:
            shares = ((x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height)
            rows.append(f"{c} {' '.join(f'{v:.9g}' for v in shares)}\n")
            corners = f"<xmin>{x1}</xmin><ymin>{y1}</ymin><xmax>{x2}</xmax><ymax>{y2}</ymax>"
            objects.append(f"<object><name>{NAMES[c]}</name><pose>x</pose><bndbox>{corners}</bndbox></object>\n")
            box = {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1), "iscrowd": 0}
            ids = {"id": len(coco["annotations"]) + 1, "image_id": number, "category_id": 10 * (c + 1)}
            coco["annotations"].append(ids | box)
        size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
        (labels / name).with_suffix(".txt").write_text("".join(rows))
        (voc / name).with_suffix(".xml").write_text(
            f"<annotation><filename>{name}</filename>{size}\n{''.join(objects)}</annotation>\n"
        )
    (root / "instances.json").write_text(json.dumps(coco))
    for name, more in (("yolo", ""), ("voc", "annotations: voc\n"), ("coco", "annotations: instances.json\n")):
        text = f"path: .\ntrain: images/train\nval: images/train\nnc: 2\nnames: [light, dark]\n{more}"
        (root / f"{name}.yaml").write_text(text)


class Row(NamedTuple):
    """One object as a strict reader reads it."""

    class_id: int
    x1: float  # pixels, as the file says
    y1: float
    x2: float
    y2: float
    crowd: bool = False


class Reading(NamedTuple):
    """The labels of an image as a strict reader reads them."""

    rows: list[Row]
    must_tell: bool  # something in it is invalid


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def strict_number(text: str) -> float | None:
    """A finite decimal number in ASCII; None for anything else."""
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    return value if math.isfinite(value) else None


def strict_yolo(data: bytes, height: int, width: int) -> Reading:
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError:
        return Reading([], True)
    rows, must_tell = [], False
    for line in text.splitlines():
        fields = line.split()
        values = [strict_number(f) for f in fields]
        if not fields:
            continue
        count = len(values)
        if None in values or (count != 5 and (count < 7 or count % 2 == 0)) or values[0] not in range(len(NAMES)):
            must_tell = True
            continue
        if count == 5:
            _, cx, cy, w, h = values
            corners = (cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2)
        else:
            corners = (min(values[1::2]), min(values[2::2]), max(values[1::2]), max(values[2::2]))
        x1, y1, x2, y2 = corners
        rows.append(Row(int(values[0]), x1 * width, y1 * height, x2 * width, y2 * height))
    return Reading(rows, must_tell)


def strict_voc(data: bytes) -> Reading:
    try:
        root = ElementTree.fromstring(data)
    except (ElementTree.ParseError, ValueError, LookupError):
        return Reading([], True)
    if root.tag != "annotation":
        return Reading([], True)
    rows, must_tell = [], False
    for element in root.findall("object"):
        boxes, names = element.findall("bndbox"), element.findall("name")
        leaves = [boxes[0].findall(tag) for tag in ("xmin", "ymin", "xmax", "ymax")] if len(boxes) == 1 else []
        whole = len(names) == 1 and leaves and all(len(found) == 1 and not len(found[0]) for found in leaves)
        numbers = [strict_number((found[0].text or "").strip()) for found in leaves] if whole else [None]
        name = (names[0].text or "").strip() if whole and not len(names[0]) else ""
        if None in numbers or name not in NAMES:
            must_tell = True
        else:
            rows.append(Row(NAMES.index(name), *numbers))
    return Reading(rows, must_tell)


class OddJsonError(Exception):
    """JSON that a strict reader refuses."""


def strict_coco(data: bytes) -> dict[str, Reading]:
    """Readings by file name. Raises OddJsonError if the whole file must be refused."""

    def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) < len(pairs):
            raise OddJsonError("a key twice")
        return dict(pairs)

    try:
        tree = json.loads(data.decode("utf-8-sig"), object_pairs_hook=once_each)
        images = {(type(i["id"]), i["id"]): i["file_name"] for i in tree["images"]}
        ids = [c["id"] for c in tree["categories"]]
        if len(images) < len(tree["images"]) or len(set(ids)) < len(ids) or any(type(i) is not int for i in ids):
            raise OddJsonError("an id twice")
        if not all(isinstance(name, str) for name in images.values()):
            raise OddJsonError("a name that is none")
        categories = {c["id"]: c["name"] for c in tree["categories"]}
        if not all(type(name) in (str, int, float) for name in categories.values()):
            raise OddJsonError("a category's name that is none")
        annotations = list(tree["annotations"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise OddJsonError(str(error)[:80]) from None
    found: dict[str, list[Row]] = {name: [] for name in images.values()}
    odd: set[str] = set()
    astray = False
    for a in annotations:
        name = images.get((type(a["image_id"]), a["image_id"])) if _is_plain(a, "image_id") else None
        if name is None:
            astray = True
            continue
        box, category, crowd = a.get("bbox"), a.get("category_id"), a.get("iscrowd", 0)
        good = isinstance(box, list) and len(box) == 4 and all(type(v) in (int, float) for v in box)
        good = good and all(abs(v) < 1e300 for v in box) and type(category) is int  # also where it is nan
        if not good or categories.get(category) not in NAMES or crowd not in (0, 1, None):
            odd.add(name)
            continue
        x, y, w, h = box
        found[name].append(Row(NAMES.index(categories[category]), x, y, x + w, y + h, bool(crowd)))
    return {name: Reading(rows, astray or name in odd) for name, rows in found.items()}


def _is_plain(a: Any, key: str) -> bool:
    return isinstance(a, dict) and type(a.get(key)) in (int, str)


def judge_boxes(index: DatasetIndex, name: str, reading: Reading, *label_files: str) -> str:
    """Checks that the index contains the boxes of an image that a strict reader reads, or reports the label file."""
    told = any(file in line for line in index.report.lines for file in (*label_files, name))
    found = [i for i, path in enumerate(index.paths) if os.path.basename(path) == name]
    if not found:
        assert told, f"{name} is left out in silence"
        return "left out by name"
    height, width = SIZES[name]
    first, last = index.offsets[found[0]], index.offsets[found[0] + 1]
    boxes = [
        (int(c), *map(float, (x, y, x + w, y + h)), bool(crowd))
        for c, (x, y, w, h), crowd in zip(
            index.classes[first:last], index.boxes_xywh_px[first:last], index.crowd[first:last]
        )
    ]
    possible, must_tell, wanted = [], reading.must_tell, []
    seen: set[Row] = set()
    for row in reading.rows:
        sides = (width, height, width, height)
        clipped = [min(max(v, 0.0), side) for v, side in zip(row[1:5], sides)]
        over = max(abs(a - b) for a, b in zip(clipped, row[1:5]))
        side = min(clipped[2] - clipped[0], clipped[3] - clipped[1], row.x2 - row.x1, row.y2 - row.y1)
        box = (row.class_id, *clipped, row.crowd)
        if row in seen or side < 0.0009 or over > 0.02 + 2e-5 * max(sides):
            must_tell = True
        elif side > 0.0011 and over < 0.009:
            wanted.append(box)
        possible.append(box)
        seen.add(row)
    if len(boxes) > 50 and len(boxes) == len(wanted):  # in the order of the file
        assert all(_alike(a, b) for a, b in zip(boxes, wanted))
    else:
        for box in boxes:
            assert any(_alike(box, other) for other in possible), f"{name}: {box} is in no row"
        for box in wanted:
            assert any(_alike(box, other) for other in boxes), f"{name}: {box} is missing"
    assert told or not must_tell, f"{name}: {len(boxes)} boxes, and not a word of what is wrong"
    assert told or len(boxes) == len(wanted) or len(possible) > len(wanted), f"{name}: {len(boxes)} boxes"
    return "named in the report" if told else "the boxes that it says"


def _alike(a: tuple, b: tuple) -> bool:
    return a[0] == b[0] and a[-1] == b[-1] and all(abs(x - y) < 0.01 for x, y in zip(a[1:-1], b[1:-1]))


def scan(root: Path, kind: str, cache: Path, **options: Any) -> Any:
    spec = load_dataset_spec(root / f"{kind}.yaml")
    return load_index(spec, "train", cache_dir=str(cache), workers=0, progress=False, max_bad=1.0, **options)


class Labels(Target):
    """Changed labels: the boxes are those that a strict reader reads, or the file is reported."""

    kind = ""

    def prepare(self, seeds: Path) -> None:
        self.root = seeds / self.name
        write_labeled(self.root)

    def run(self, case: Case) -> str:
        root = case.folder / "set"
        shutil.copytree(self.root, root)
        name = case.chance.choice(list(SIZES))
        path = self.file(root, name)
        others = [self.file(self.root, other).read_bytes() for other in SIZES]
        data = path.read_bytes()
        if case.chance.random() < 0.35:
            data, what = fuzz_inputs.change_bytes(data, case.chance, others)
        else:
            data, what = self.change(data, case.chance)
        case.said.append(f"{path.name}: {what}")
        path.write_bytes(data)
        index = attempt(lambda: scan(root, self.kind, case.folder / "cache"))
        if isinstance(index, Refused):
            return index.names(path)
        return self.judge(index, name, data, path.name)

    def file(self, root: Path, name: str) -> Path:
        raise NotImplementedError

    def change(self, data: bytes, chance: random.Random) -> fuzz_inputs.Change:
        raise NotImplementedError

    def judge(self, index: DatasetIndex, changed: str, data: bytes, file: str) -> str:
        verdict = ""
        for name in SIZES:
            path = self.file(self.root, name)
            reading = self.read(data if name == changed else path.read_bytes(), name)
            one = judge_boxes(index, name, reading, path.name)
            verdict = one if name == changed else verdict
        return verdict

    def read(self, data: bytes, name: str) -> Reading:
        raise NotImplementedError


class YoloLabels(Labels):
    name, kind, weight = "yolo", "yolo", 3.0

    def file(self, root: Path, name: str) -> Path:
        return (root / "labels" / "train" / name).with_suffix(".txt")

    def change(self, data: bytes, chance: random.Random) -> fuzz_inputs.Change:
        return fuzz_inputs.change_rows(data, chance)

    def read(self, data: bytes, name: str) -> Reading:
        return strict_yolo(data, *SIZES[name])


class VocLabels(Labels):
    name, kind, weight = "voc", "voc", 2.0

    def file(self, root: Path, name: str) -> Path:
        return (root / "voc" / name).with_suffix(".xml")

    def change(self, data: bytes, chance: random.Random) -> fuzz_inputs.Change:
        return fuzz_inputs.change_xml(data, chance)

    def read(self, data: bytes, name: str) -> Reading:
        return strict_voc(data)


class CocoLabels(Labels):
    name, kind, weight = "coco", "coco", 2.0

    def file(self, root: Path, name: str) -> Path:
        return root / "instances.json"

    def change(self, data: bytes, chance: random.Random) -> fuzz_inputs.Change:
        return fuzz_inputs.change_json(data, chance)

    def judge(self, index: DatasetIndex, changed: str, data: bytes, file: str) -> str:
        try:
            readings = strict_coco(data)
        except OddJsonError as error:
            raise AssertionError(f"taken, though {error}") from None
        except (TypeError, AttributeError, KeyError):  # annotations that are not JSON objects
            readings = {name: Reading([], True) for name in SIZES}
        verdict = ""
        told = any(file in line for line in index.report.lines)
        for name in SIZES:
            if name not in readings:
                assert any(name in line for line in index.report.lines), f"{name} is left out in silence"
                verdict = "left out by name"
            else:
                verdict = judge_boxes(index, name, readings[name], *([file] if told else []))
        return verdict


# YAML


class Yaml(Target):
    """A changed YAML: refused with a line that names it, or read as a plain reader reads it."""

    def change(self, path: Path, case: Case) -> None:
        data = path.read_bytes()
        if case.chance.random() < 0.3:
            data, what = fuzz_inputs.change_bytes(data, case.chance)
        else:
            data, what = fuzz_inputs.change_yaml(data, case.chance)
        case.said.append(what)
        path.write_bytes(data)

    def plainly(self, path: Path) -> Any:
        text = path.read_text(encoding="utf-8-sig")
        return yaml.load(text, Loader=self.parser(text))

    def parser(self, text: str) -> type:
        """PyYAML's Python parser, unlike the program's libyaml, unless there are tabs, where it is too strict."""
        return yaml.CSafeLoader if "\t" in text else yaml.SafeLoader

    def check_no_key_twice(self, path: Path) -> None:
        def check(node: yaml.Node) -> None:
            if isinstance(node, yaml.MappingNode):
                keys = [(k.tag, k.value) for k, _ in node.value if isinstance(k, yaml.ScalarNode)]
                assert len(keys) == len(set(keys)), "a key twice, in silence"
            for child in node.value if isinstance(node.value, list) else ():
                for part in child if isinstance(child, tuple) else (child,):
                    check(part)

        text = path.read_text(encoding="utf-8-sig")
        root = yaml.compose(text, Loader=self.parser(text))
        if root is not None:
            check(root)


class DataYaml(Yaml):
    name, weight = "data-yaml", 2.0

    def prepare(self, seeds: Path) -> None:
        self.root = seeds / self.name
        write_labeled(self.root)

    def run(self, case: Case) -> str:
        path = case.folder / "changed.yaml"
        text = self.root.joinpath(f"{case.chance.choice(('yolo', 'voc', 'coco'))}.yaml").read_text()
        path.write_text(text.replace("path: .", f"path: {self.root}") + "download: x\n")
        self.change(path, case)

        def look() -> tuple:
            spec = load_dataset_spec(path)
            return spec, list_split(spec, "train")

        result = attempt(look)
        if isinstance(result, Refused):
            return result.names(path, self.root, *(p.name for p in self.root.rglob("*")))
        spec, listing = result
        plain = self.plainly(path)
        self.check_no_key_twice(path)
        names = plain.get("names")
        if isinstance(names, dict):
            names = [names[i] for i in range(len(names))]
        if names is not None:
            assert spec.names == tuple(str(n).strip() for n in names), spec.names
        assert [i.name.rsplit("/", 1)[-1] for i in listing.images] == sorted(SIZES)
        return "taken as it says"


class RecipeYaml(Yaml):
    name = "recipe"

    def run(self, case: Case) -> str:
        path = case.folder / "changed.yaml"
        shutil.copy(Path(__file__).parents[2] / "configs" / "hyp" / "scratch.yaml", path)
        self.change(path, case)
        result = attempt(lambda: read_recipe(str(path), pretrained=False))
        if isinstance(result, Refused):
            return result.names(path)
        self.check_no_key_twice(path)
        assert isinstance(result, Hyperparameters)
        for key, value in (self.plainly(path) or {}).items():
            held = getattr(result, key)
            assert held == value or held == float(value), f"{key}: {value!r} becomes {held!r}"
        return "taken as it says"


class CommandLines(Target):
    """Arguments of the ``yolo`` command, or a file of its or YOLOv5's hyper-parameters: a line, and what it suggests is
    accepted."""

    name, weight = "lines", 3.0

    def run(self, case: Case) -> str:
        chance = case.chance
        if chance.random() < 0.3:
            return self.hyperparameters(case)
        config, arguments = chance.choice(list(yolo_lines.PROGRAMS.values())), yolo_lines.draw_arguments(chance)
        case.said.append(f"{config.__name__}: {arguments}")
        text = yolo_lines.said(config, arguments)
        if not text:
            return "accepted"
        return "a line that is accepted" if yolo_lines.check_line(text) else "refused in a line"

    @staticmethod
    def hyperparameters(case: Case) -> str:
        path = case.folder / "hyp.yaml"
        values = yolo_lines.draw_hyperparameters(case.chance)
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        result = attempt(lambda: read_recipe(str(path), pretrained=False, lines=case.said))
        if isinstance(result, Refused):
            yolo_lines.check_line(f"error: {result.line}\n")
            return result.names(path)
        for key, value in values.items():
            told = any(f"{key} {value}"[:40] in line for line in case.said)
            assert told or getattr(result, key) == value, f"{key}: {value!r} is used as {getattr(result, key, None)}"
        return "used, and the rest is named"


class ModelYaml(Yaml):
    name = "model"

    def prepare(self, seeds: Path) -> None:
        self.path = write_model(seeds / "plain.yaml")
        self.others = [self.path, *(Path(__file__).parents[2] / "configs" / "models").glob("yolo*8.yaml")]

    def run(self, case: Case) -> str:
        path = case.folder / "changed.yaml"
        shutil.copy(case.chance.choice(self.others), path)
        self.change(path, case)
        result = attempt(lambda: build_on_meta(load_spec(path), 2, NAMES))
        if isinstance(result, Refused):
            return result.names(path)
        self.check_no_key_twice(path)
        return "built"


# Checkpoints


class Runs:
    """A training run of one epoch, which is made once."""

    made: ClassVar[dict[Path, Path]] = {}

    @classmethod
    def folder(cls, seeds: Path) -> Path:
        if seeds not in cls.made:
            root = seeds / "world"
            write_labeled(root)
            flags = ["--data", root / "yolo.yaml", "--model", write_model(root / "tiny.yaml"), "--epochs", "1", *SMALL]
            flags += ["--project", root / "runs", "--cache-dir", root / "cache", "--optimizer", "SGD"]
            code, out, err = run_script(train.main, *flags, folder=seeds)
            assert code == 0, out + err
            cls.made[seeds] = root
        return cls.made[seeds]


class Checkpoints(Target):
    """A damaged checkpoint is refused, or gives what was saved. A hostile one, or one with replaced values, may do no
    worse than be refused."""

    name, weight = "checkpoints", 3.0

    def prepare(self, seeds: Path) -> None:
        runs = Runs.folder(seeds) / "runs" / "exp"
        self.files = {"last.pt": (runs / "last.pt").read_bytes(), "best.pt": (runs / "best.pt").read_bytes()}
        self.contents = {name: read_checkpoint(runs / name) for name in self.files}
        weights = {f"model.{k}": v for k, v in self.contents["last.pt"]["model"].items()}
        path = seeds / "foreign.pt"
        torch.save({"model": weights, "names": list(NAMES), "epoch": 3}, path)
        self.files["foreign.pt"] = path.read_bytes()
        self.foreign = read_weights(path)
        last = self.contents["last.pt"]
        kept = {k: v for k, v in last.items() if k not in ("model", "ema", "optimizer", "scaler", "rank_buffers")}
        self.plain = json.dumps(kept).encode()

    def run(self, case: Case) -> str:
        name = case.chance.choice(list(self.files))
        path = case.folder / name
        kind = case.chance.random()
        is_damage = kind < 0.6
        if is_damage:
            others = [d for n, d in self.files.items() if n != name]
            data, what = fuzz_inputs.change_bytes(self.files[name], case.chance, others)
            path.write_bytes(data)
        elif kind < 0.85:
            name, path = "last.pt", case.folder / "last.pt"
            what = self.write_other_values(path, case.chance)
        else:
            what = self.write_hostile(path, case.chance)
        case.said.append(f"{name}: {what}")
        return self.judge(path, name, is_damage)

    def judge(self, path: Path, name: str, is_damage: bool) -> str:
        foreign = name == "foreign.pt"
        if not foreign:
            content = attempt(lambda: read_checkpoint(path))
            if isinstance(content, Refused):
                content.names(path)
            elif is_damage:
                same_content(content, self.contents[name])
            if name == "last.pt":
                run = attempt(lambda: self.resume(path))
                if isinstance(run, Refused):
                    run.names(path)
        stored = attempt(lambda: read_weights(path))
        if isinstance(stored, Refused):
            return stored.names(path)
        if is_damage and foreign:
            same_content(stored.tensors, self.foreign.tensors)
        elif is_damage:
            assert not isinstance(content, Refused)
        loaded = attempt(lambda: load_detector(path))
        if isinstance(loaded, Refused):
            return loaded.names(path)
        return "what was saved" if is_damage else "loaded"

    def resume(self, path: Path) -> None:
        """Does what --resume does with a checkpoint before anything is built."""
        checkpoint, flags = Checkpoint.read(path), TrainConfig()
        config, _ = resumed_config(checkpoint.config, flags, (), path)
        resumed_hyperparameters(checkpoint.hyp, flags, (), path, pretrained=False)
        changed = {"fingerprint": "", "batch_size": 4, "epoch_batches": 1, "accumulate": 1}
        resumed_position(checkpoint, **changed, epochs=config.epochs)

    def write_other_values(self, path: Path, chance: random.Random) -> str:
        last = self.contents["last.pt"]
        while True:
            changed, what = fuzz_inputs.change_json(self.plain, chance)
            with contextlib.suppress(ValueError, RecursionError):
                tree = json.loads(changed)
                break
        if isinstance(tree, dict):
            for key in ("model", "ema", "optimizer", "scaler", "rank_buffers"):
                if key in last and chance.random() < 0.95:
                    tree[key] = last[key]
            if chance.random() < 0.2:
                key = chance.choice([k for k in ("model", "ema", "optimizer", "scaler") if last.get(k)] or ["model"])
                tree[key], what = self.other_tensors(last[key], chance)
        with contextlib.suppress(RecursionError):
            torch.save(tree, path)
        return what

    @staticmethod
    def other_tensors(held: dict[str, Any], chance: random.Random) -> tuple[Any, str]:
        held = dict(held)
        key = chance.choice(list(held))
        odd = (None, 5, "x", [], {}, torch.zeros(0), torch.zeros(3, 3), torch.full((8, 3, 3, 3), math.nan), -1, [None],
               torch.zeros(8, dtype=torch.int64), torch.zeros(2, dtype=torch.complex64), 2**70, {"x": torch.zeros(1)},
               torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), (8,)))  # fmt: skip
        if chance.random() < 0.2:
            del held[key]
            return held, f"no {key}"
        number = chance.randrange(len(odd))
        held[key] = odd[number]
        return held, f"{key} is odd value {number}"

    def write_hostile(self, path: Path, chance: random.Random) -> str:
        kind = chance.randrange(6)
        if kind == 0:
            where = chance.choice([("os", "system"), ("builtins", "eval"), ("torch", "load"), ("torch.nn", "Linear"),
                                   ("torch._utils", "_rebuild_tensor_v2"), ("torch", "Size"), ("x", "y"),
                                   ("torch.serialization", "load"), ("collections", "OrderedDict")])  # fmt: skip
            zip_around(opcode_call(*where, "true"), path)
            return f"calls {'.'.join(where)}"
        if kind == 1:
            numbers = [chance.choice((0, 1, 2, 6, 7, 2**31, 2**40, 2**62, -1, -(2**40))) for _ in range(4)]
            zip_around(tensor_program((numbers[0],), (numbers[1],), numbers[2], numbers[3]), path, **{"0": bytes(24)})
            return f"a tensor of {numbers}"
        with zipfile.ZipFile(io.BytesIO(self.files[path.name])) as archive:
            entries = {e.filename: archive.read(e) for e in archive.infolist()}
        program = next(n for n in entries if n.endswith("data.pkl"))
        chosen = program if chance.random() < 0.75 else chance.choice(list(entries))
        what = "as it was"
        if kind in (2, 3, 4):  # with a true checksum
            entries[chosen], what = fuzz_inputs.change_bytes(entries[chosen], chance)
        else:
            entries.pop(chosen)
        with zipfile.ZipFile(path, "w", chance.choice((zipfile.ZIP_STORED,) * 4 + (zipfile.ZIP_DEFLATED,))) as archive:
            for name, data in entries.items():
                archive.writestr(name, data)
                if kind == 4 and name == chosen:
                    import warnings

                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        archive.writestr(name, data)
        return f"{chosen} {what}"


class Safetensors(Target):
    """A changed safetensors file is refused, or gives the tensors that a plain reader finds in it."""

    name, weight = "safetensors", 2.0

    def prepare(self, seeds: Path) -> None:
        best = Runs.folder(seeds) / "runs" / "exp" / "best.pt"
        convert_weights(best, seeds / "own.safetensors")
        tensors, _ = read_safetensors(seeds / "own.safetensors")
        from utils.files.checkpoint import write_safetensors

        write_safetensors(seeds / "other.safetensors", tensors, {"format": "pt"})
        self.files = {n: (seeds / n).read_bytes() for n in ("own.safetensors", "other.safetensors")}

    def run(self, case: Case) -> str:
        name = case.chance.choice(list(self.files))
        path = case.folder / name
        if case.chance.random() < 0.4:
            others = [d for n, d in self.files.items() if n != name]
            data, what = fuzz_inputs.change_bytes(self.files[name], case.chance, others)
        else:
            data, what = fuzz_inputs.change_safetensors(self.files[name], case.chance)
        case.said.append(f"{name}: {what}")
        path.write_bytes(data)
        found = attempt(lambda: read_safetensors(path))
        if isinstance(found, Refused):
            found.names(path)
        else:
            self.compare(found[0], data)
        loaded = attempt(lambda: load_detector(path))
        if isinstance(loaded, Refused):
            return loaded.names(path)
        assert not isinstance(found, Refused)
        return "the tensors that it holds"

    @staticmethod
    def compare(tensors: dict[str, torch.Tensor], data: bytes) -> None:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        assert header.keys() == tensors.keys()
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            raw = tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes() if end > begin else b""
            assert raw == data[8 + length + begin : 8 + length + end], name
            assert list(tensors[name].shape) == entry["shape"]
            assert tensors[name].dtype == SAFETENSORS_DTYPES[entry["dtype"]]


# Exported files


class Cells(torch.nn.Module):
    """A detector of 2 classes, as small as one can be: images (B, 3, 64, 64) to columns (B, 6, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 6, 32, 32)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.conv(images).flatten(2)


def write_exports(folder: Path) -> None:
    """The detector in each format whose packages are installed."""
    module, images = Cells().eval(), torch.zeros(1, 3, 64, 64)
    metadata = ExportMetadata(
        names=NAMES, imgsz_hw=(64, 64), layout="raw", nms_iou=0.7, validation_iou=0.7, confidence=0.3
    )
    with quiet():
        write_torchscript(torch.jit.trace(module, images), folder / "a.torchscript", metadata)
        write_pt2(torch.export.export(module, (images,)), folder / "a.pt2", metadata)
    if not all(map(find_spec, ("onnx", "onnxruntime"))):
        return
    import onnx

    info, node = onnx.helper.make_tensor_value_info, onnx.helper.make_node
    nodes = [
        node("Conv", ["images", "weight", "bias"], ["cells"], kernel_shape=[32, 32], strides=[32, 32]),
        node("Reshape", ["cells", "shape"], ["output0"]),
    ]
    values = {"weight": module.conv.weight, "bias": module.conv.bias, "shape": torch.tensor([1, 6, 4])}
    tensors = [onnx.numpy_helper.from_array(value.detach().numpy(), name) for name, value in values.items()]
    ports = [info("images", 1, [1, 3, 64, 64])], [info("output0", 1, [1, 6, 4])]
    graph = onnx.helper.make_graph(nodes, "cells", *ports, tensors)
    proto = onnx.helper.make_model(graph, ir_version=9, opset_imports=[onnx.helper.make_opsetid("", 18)])
    write_onnx(proto, folder / "a.onnx", metadata)
    if find_spec("openvino"):
        write_openvino(build_openvino(proto), folder / "a_openvino_model", metadata, name="a", half=False)


def in_child(call: Callable[[], str], seconds: float) -> str:
    """The verdict of ``call`` in a forked process. An exception, or a traceback that it prints, is a finding. That it
    dies is none: the native code of runtimes does not survive every damaged file, nor end on every one."""
    with tempfile.TemporaryFile() as verdict, tempfile.TemporaryFile() as printed:
        if not (child := os.fork()):
            try:
                for stream in (1, 2):
                    os.dup2(printed.fileno(), stream)
                verdict.write(call().encode())
            except BaseException:
                os.write(2, traceback.format_exc().encode("utf-8", "replace"))
            verdict.flush()
            os._exit(0)
        end = time.monotonic() + seconds
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
            time.sleep(0.01)
        if ended == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "the runtime does not end"
        printed.seek(0)
        text = printed.read().decode("utf-8", "replace")
        assert "Traceback" not in text, text
        verdict.seek(0)
        return verdict.read().decode() or "the runtime dies"


class ExportedFiles(Target):
    """A changed exported file that may run code is refused without trust, unread; with trust, it works, or is refused,
    or its runtime dies. ONNX files need no trust."""

    name, weight, deadline_s = "exports", 1.0, 60.0

    def prepare(self, seeds: Path) -> None:
        self.root = seeds / self.name
        self.root.mkdir()
        # OpenVINO's threads would be missing in the workers if it had run in this process.
        written = in_child(lambda: write_exports(self.root) or "written", seconds=300)
        assert written == "written", written
        self.files = {p.relative_to(self.root): p.read_bytes() for p in self.root.rglob("*") if p.is_file()}
        # What the children would each import.
        open_model(self.root / "a.pt2", device=torch.device("cpu"), trust=True)
        with contextlib.suppress(UserError):
            require_package("onnxruntime", "fuzzing", "leave it out")
            import_openvino("fuzzing")

    def run(self, case: Case) -> str:
        chance, name = case.chance, case.chance.choice(list(self.files))
        shutil.copytree(self.root, case.folder / "files")
        path = case.folder / "files" / name
        whole = path.parent if path.parent.suffix == "" and path.parent.name != "files" else path
        if whole != path and chance.random() < 0.3:
            whole = path.parent / "a.xml"
        record_export(whole, whole)
        data, what = self.change(self.files[name], path.suffix, chance)
        case.said.append(f"{name}: {what}")
        path.write_bytes(data)
        needs_trust = path.suffix != ".onnx"
        if needs_trust:
            is_own = data == self.files[name]
            assert is_own_export(whole) == is_own
            if not is_own:
                refused = attempt(lambda: open_model(whole, device=torch.device("cpu")))
                assert isinstance(refused, Refused), "opened"
                assert "--trust" in refused.line, refused.line
                refused.names(whole)
        verdict = in_child(lambda: self.detect(whole, needs_trust), seconds=self.deadline_s / 2)
        return f"{path.suffix} {verdict}" if verdict.startswith("the runtime") else verdict

    def change(self, data: bytes, suffix: str, chance: random.Random) -> fuzz_inputs.Change:
        if chance.random() < 0.4 or suffix == ".bin":
            return fuzz_inputs.change_bytes(data, chance)
        if suffix == ".onnx":
            return self.change_onnx(data, chance)
        changes = {".xml": fuzz_inputs.change_xml, ".yaml": fuzz_inputs.change_yaml}
        return changes.get(suffix, fuzz_inputs.change_archive)(data, chance)

    @staticmethod
    def change_onnx(data: bytes, chance: random.Random) -> fuzz_inputs.Change:
        """Changes the metadata, or places a tensor into another file."""
        import onnx

        proto = onnx.load_from_string(data)
        if chance.random() < 0.2:
            tensor = chance.choice(proto.graph.initializer)
            tensor.data_location = onnx.TensorProto.EXTERNAL
            tensor.ClearField("raw_data")
            entry = tensor.external_data.add(key=chance.choice(("location", "location", "offset", "x")))
            entry.value = chance.choice(("../a.onnx", "a.onnx", "a.pt2", "", ".", "/dev/zero", "*/_ORT_MEM_ADDR_/*"))
            return proto.SerializeToString(), f"{tensor.name} is in {entry.value!r}"
        entry = chance.choice(proto.metadata_props)
        if entry.key == "lockstep" and chance.random() < 0.7:
            changed, what = fuzz_inputs.change_json(entry.value.encode(), chance)
            entry.value = changed.decode("utf-8", "replace")
        else:
            entry.value = chance.choice((*fuzz_inputs.JSON_TEXTS, *fuzz_inputs.YAML_TEXTS)).encode("utf-8", "replace")
            what = entry.value[:40]
        return proto.SerializeToString(), f"{entry.key}: {what}"

    @staticmethod
    def detect(path: Path, trust: bool) -> str:
        image = np.full((40, 50, 3), 128, np.uint8)
        found = attempt(lambda: Predictor(open_model(path, device=torch.device("cpu"), trust=trust)).detect([image]))
        return found.names(path, *path.parent.iterdir()) if isinstance(found, Refused) else "works"


# Caches


def same_index(a: DatasetIndex, b: DatasetIndex) -> None:
    assert list(a.paths) == list(b.paths)
    assert list(a.report.lines) == list(b.report.lines)
    assert a.fingerprint == b.fingerprint
    for name in ("image_hw", "offsets", "boxes_xywh_px", "classes", "crowd", "area_px"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name


class IndexCache(Target):
    """Whatever the cache files contain, the index equals that of a scan."""

    name, weight = "index-cache", 1.5

    def prepare(self, seeds: Path) -> None:
        self.root = seeds / self.name
        write_labeled(self.root)
        self.cache = seeds / f"{self.name}.cache"
        (self.root / "labels/train/b.txt").write_text("0 0.5 0.5 0.2 0.2\nnonsense\n")
        self.index = scan(self.root, "yolo", self.cache)
        damaged = DamagedImages(self.index, "train", cache_dir=str(self.cache), max_bad=1.0)
        damaged.add(self.index.path(0), "Corrupt JPEG data: 5 extraneous bytes")
        damaged.add(self.index.path(2), "Premature end of JPEG file")
        assert {p.suffix for p in self.cache.iterdir()} == {".index", ".txt", ".damaged"}

    def run(self, case: Case) -> str:
        cache = case.folder / "cache"
        shutil.copytree(self.cache, cache)
        path = case.chance.choice(sorted(cache.iterdir()))
        data = path.read_bytes()
        if path.suffix == ".damaged" and case.chance.random() < 0.5:
            line, what = fuzz_inputs.change_json(b'["images/train/a.png", "Corrupt"]', case.chance)
            data += line + b"\n"
        elif path.suffix == ".index" and case.chance.random() < 0.3:
            data, what = self.with_true_sums(data, case.chance)
        else:
            others = [p.read_bytes() for p in cache.iterdir()]
            data, what = fuzz_inputs.change_bytes(data, case.chance, others)
        case.said.append(f"{path.suffix}: {what}")
        path.write_bytes(data)
        index = attempt(lambda: scan(self.root, "yolo", cache))
        assert isinstance(index, DatasetIndex), index
        same_index(index, self.index)
        damaged = DamagedImages(index, "train", cache_dir=str(cache), max_bad=1.0)
        damaged.check()
        damaged.add(index.path(1), "Corrupt")
        damaged.check()
        assert any("b.png is damaged" in line for line in case.said)
        return "the index of a scan"

    @classmethod
    def with_true_sums(cls, data: bytes, chance: random.Random) -> fuzz_inputs.Change:
        """Another valid header, as another version could write it under the same name."""
        magic, length, _, body_crc = struct.unpack("<8sIII", data[:20])
        header = json.loads(data[20 : 20 + length])
        header["meta"]["version"] = chance.choice(([1, 1], [3, 2], None, "x", 2))
        raw = json.dumps(header).encode()
        return struct.pack("<8sIII", magic, len(raw), zlib.crc32(raw), body_crc) + raw + data[20 + length :], "version"


class ImageCache(Target):
    """A damaged disk cache gives the pixels of the files, is created again, or is refused by name."""

    name, weight = "image-cache", 1.0

    def prepare(self, seeds: Path) -> None:
        self.root = seeds / self.name
        write_labeled(self.root)
        self.cache = seeds / f"{self.name}.cache"
        self.index = scan(self.root, "yolo", self.cache)
        cache = open_image_cache(self.index, "disk", imgsz=64, cache_dir=str(self.cache))
        self.pixels = [np.array(cache[i]) for i in range(len(self.index))]
        (path,) = self.cache.glob("*.lmdb")
        self.files = {file.name: file.read_bytes() for file in (path, path.with_suffix(".tree"))}

    def run(self, case: Case) -> str:
        for name, data in self.files.items():
            (case.folder / name).write_bytes(data)
        path = case.folder / case.chance.choice(list(self.files))
        data, what = fuzz_inputs.change_bytes(path.read_bytes(), case.chance)
        case.said.append(f"{path.suffix}: {what}")
        path.write_bytes(data)
        disk_cache._environment.cache_clear()

        def read() -> list[np.ndarray]:
            cache = open_image_cache(self.index, "disk", imgsz=64, cache_dir=str(case.folder))
            return [cache[i] for i in range(len(self.index))]

        found = attempt(read)
        if isinstance(found, Refused):
            return found.names(*self.files)
        for i, (a, b) in enumerate(zip(found, self.pixels)):
            assert np.array_equal(a, b), f"image {i}: other pixels"
        return "the pixels of the files"


class ShardSets(Target):
    """A changed index or tar file gives images with the bytes of the files and labels inside them, or is refused."""

    name, weight = "shards", 1.0

    def prepare(self, seeds: Path) -> None:
        root = seeds / self.name
        write_labeled(root)
        self.set = seeds / f"{self.name}.set"
        write_set(load_dataset_spec(root / "coco.yaml"), self.set, 30_000, cache_dir=str(seeds / f"{self.name}.cache"))
        self.images = {path.read_bytes() for path in (root / "images" / "train").iterdir()}

    def run(self, case: Case) -> str:
        shutil.copytree(self.set, case.folder, dirs_exist_ok=True)
        path = self.change(case)
        before = sorted(case.folder.iterdir())
        found = attempt(lambda: self.read(case.folder / "data.yaml"))
        assert sorted(case.folder.iterdir()) == before, "writes to the data set"
        if isinstance(found, Refused):
            return found.names("data.yaml", path, *(file.name for file in case.folder.iterdir()))
        return self.judge(found)

    @classmethod
    def change(cls, case: Case) -> Path:
        """Changes a file of the set in the case's folder, and returns its path."""
        path = case.chance.choice([case.folder / "train.shards", *sorted(case.folder.glob("train-*.tar"))])
        data = path.read_bytes()
        if case.chance.random() < 0.15:
            what = case.chance.choice([kind for kind in fuzz_inputs.ODD_KINDS if kind != "sparse"])
            fuzz_inputs.make_odd_kind(path, what)
        elif path.suffix == ".shards" and case.chance.random() < 0.8:
            data, what = cls.with_true_sums(data, case.chance)
            path.write_bytes(data)
        else:
            data, what = fuzz_inputs.change_bytes(data, case.chance)
            path.write_bytes(data)
        case.said.append(f"{path.name}: {what}")
        return path

    @staticmethod
    def read(data: Path | str) -> tuple[DatasetIndex, list[bytes]]:
        index = load_index(load_dataset_spec(data), "train", progress=False, max_bad=1.0)
        index.ground_truth()
        take_census(index, "train", 640)
        warn_of_small_boxes(index, imgsz=640, stride=32)
        return index, [read_bytes(index.path(i)) for i in range(len(index))]

    def judge(self, found: tuple[DatasetIndex, list[bytes]]) -> str:
        index, images = found
        assert set(images) <= self.images, "other images"
        labels, _ = index.labels_of(np.arange(len(index)))
        assert ((labels[:, 1:] >= 0) & (labels[:, 1:] <= 1 + 1e-5)).all(), "labels outside their images"
        return "images of the files"

    @classmethod
    def with_true_sums(cls, data: bytes, chance: random.Random) -> fuzz_inputs.Change:
        """Another header or other arrays, with the checksums of an index that was written so."""
        magic, length, _, _ = struct.unpack("<8sIII", data[:20])
        header, body = data[20 : 20 + length], data[20 + length :]
        kind = chance.random()
        if kind < 0.2:
            content, text = json.loads(header), chance.choice(STRINGS)
            if chance.random() < 0.5:
                content["meta"]["shards"][0][0] = text
            else:
                content["meta"]["fingerprint"] = text
            header, what = json.dumps(content).encode(), f"a name {text!r}"
        elif kind < 0.6:
            header, what = fuzz_inputs.change_json(header, chance)
        else:
            body, what = fuzz_inputs.change_bytes(body, chance)
            header = cls.with_true_fingerprint(header, body)
        return struct.pack("<8sIII", magic, len(header), zlib.crc32(header), zlib.crc32(body)) + header + body, what

    @staticmethod
    def with_true_fingerprint(header: bytes, body: bytes) -> bytes:
        """The header of an index whose arrays were changed before it was written."""
        content = json.loads(header)
        with contextlib.suppress(ValueError):  # cut off
            parts = content["arrays"].items()
            arrays = {k: np.frombuffer(body, dtype, math.prod(shape), at) for k, (dtype, shape, at) in parts}
            content["meta"]["fingerprint"] = fingerprint_of(arrays)
        return json.dumps(content).encode()


class Stores(ShardSets):
    """Answers of a store that are changed, cut, of another length or code, or about another file, and changed files in
    it: images of the files, or a line that names the address."""

    name, weight, deadline_s = "stores", 0.3, 60.0

    def prepare(self, seeds: Path) -> None:
        require_package("obstore", "the target 'stores'", "leave it out")
        super().prepare(seeds)

    def run(self, case: Case) -> str:
        client.PATIENCE_S = 0.0
        (case.folder / "set").mkdir()
        shutil.copytree(self.set, case.folder / "set", dirs_exist_ok=True)
        kinds: list[Any] = [None] * 8
        if case.chance.random() < 0.3:
            self.change(case._replace(folder=case.folder / "set"))
        else:
            kinds += case.chance.sample(ANSWERS, k=2)
        chance, said = random.Random(case.chance.random()), case.said

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                file = case.folder / self.path.strip("/")
                data = file.read_bytes() if file.is_file() else b""
                first, last = (int(n) for n in self.headers["Range"].removeprefix("bytes=").split("-"))
                part, status = data[first : last + 1], 206 if data else 404
                last = min(last, len(data) - 1)
                headers = {"ETag": '"1"', "Last-Modified": "Wed, 01 Jul 2026 10:00:00 GMT"}
                headers |= {"Content-Range": f"bytes {first}-{last}/{len(data)}", "Content-Length": str(len(part))}
                match kind := chance.choice(kinds):
                    case int():
                        status = kind
                    case str():
                        part, what = fuzz_inputs.change_bytes(part or b"x", chance)
                        headers["Content-Length"] = str(len(part) + int(kind))
                        said.append(what)
                    case (name, value):
                        headers[name] = value
                if kind is not None:
                    said.append(f"{self.path}: {kind}")
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(part)

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            server.handle_error = lambda *_: None
            threading.Thread(target=server.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{server.server_port}/set"
            found = attempt(lambda: self.read(url))
            server.shutdown()
        if isinstance(found, Refused):
            assert url in found.line or str(case.folder / "xdg") in found.line, found.line
            assert len(found.line) <= MOST_CHARACTERS
            return "refused in a line"
        return self.judge(found)


class Results(Target):
    """A changed results.csv is refused, or keeps every row that a plain reader finds in it."""

    name = "results"
    deadline_s = 30.0  # the first one imports Matplotlib

    def prepare(self, seeds: Path) -> None:
        self.data = (Runs.folder(seeds) / "runs" / "exp" / "results.csv").read_bytes()
        lines = self.data.decode().splitlines()
        more = [",".join([str(e), *lines[1].split(",")[1:]]) for e in range(2, 5)]
        self.data = ("\n".join([*lines, *more]) + "\n").encode()
        unchanged = seeds / "results.csv"
        unchanged.write_bytes(self.data)
        plot_curves(unchanged, unchanged.with_suffix(".png"))  # imports Matplotlib, which takes seconds

    def run(self, case: Case) -> str:
        path = case.folder / "results.csv"
        if case.chance.random() < 0.4:
            rows = [line.split(",") for line in self.data.decode().splitlines()]
            row = case.chance.choice(rows)
            at = case.chance.choice((0, case.chance.randrange(len(row))))
            row[at] = case.chance.choice(fuzz_inputs.NUMBER_TEXTS)
            data, what = "".join(",".join(r) + "\n" for r in rows).encode("utf-8", "surrogatepass"), f"{row[at][:40]!r}"
        else:
            data, what = fuzz_inputs.change_bytes(self.data, case.chance)
        case.said.append(what)
        path.write_bytes(data)

        def go_on() -> None:
            results = CsvTracker(path)
            results.start({}, 4)
            results.epoch(4, {"metrics/AP": 0.5, "new": 1.0})

        done = attempt(go_on)
        if isinstance(done, Refused):
            return done.names(path)
        before = {int(r["epoch"]): r for r in csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""))}
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        after = {int(r["epoch"]): r for r in rows}
        assert len(rows) == len(after)
        assert after.keys() == {e for e in before if e < 4} | {4}, f"{sorted(before)} became {sorted(after)}"
        for epoch in after.keys() - {4}:
            kept = {k: v for k, v in before[epoch].items() if v}
            assert kept == {k: v for k, v in after[epoch].items() if v}, f"epoch {epoch}"
        drawn = attempt(lambda: plot_curves(path, case.folder / "results.png"))
        assert drawn is None, drawn
        return "goes on"


# What kind of file it is


class OddKinds(Target):
    """Pipes, folders, circular links and the like in place of files."""

    name = "kinds"

    def prepare(self, seeds: Path) -> None:
        self.world = Runs.folder(seeds)
        self.root = seeds / self.name
        write_labeled(self.root)
        (self.root / "list.txt").write_text("".join(f"images/train/{n}\n" for n in SIZES))
        text = (self.root / "yolo.yaml").read_text()
        (self.root / "list.yaml").write_text(text.replace("train: images/train", "train: list.txt"))

    def run(self, case: Case) -> str:
        root, chance = case.folder / "set", case.chance
        shutil.copytree(self.root, root)
        kinds = [k for k in fuzz_inputs.ODD_KINDS if k != "unreadable" or os.getuid()]
        kind = chance.choice(kinds)
        scans = {
            "images/train/a.png": ("yolo", "voc", "coco", "list"), "labels/train/a.txt": ("yolo", "list"),
            "voc/a.xml": ("voc",), "instances.json": ("coco",), "list.txt": ("list",), "yolo.yaml": ("yolo",),
            "labels/train": ("yolo",), "images/train": ("yolo", "voc"), "voc": ("voc",), "extra": ("yolo",),
        }  # fmt: skip
        others = ("hyp.yaml", "model.yaml", "last.pt", "x.safetensors", "results.csv", "index", "damaged",
                  "lmdb", "source")  # fmt: skip
        which = chance.choice((*scans, *others))
        case.said.append(f"{which} is {kind}")
        if which in scans:
            target = root / which
            if which == "extra":
                target = root / chance.choice(("images/train/x.jpg", "labels/train/x.txt", "images/train/x.txt"))
                target.write_bytes(b"x")
            elif target.is_dir():
                shutil.rmtree(target)
                target.write_bytes(b"x")
            return self.scanned(case, root, chance.choice(scans[which]), target, kind)
        return self.others(case, root, which, kind)

    def scanned(self, case: Case, root: Path, how: str, target: Path, kind: str) -> str:
        fuzz_inputs.make_odd_kind(target, kind)
        index = attempt(lambda: scan(root, how, case.folder / "cache"))
        if isinstance(index, Refused):
            return index.names(target, "data", target.parent)
        file = target.name
        if file.startswith("x."):
            assert len(index) >= len(SIZES)
            return "the others as they are"
        if kind == "full folder" and target.suffix == ".png":  # a folder among the folders, with the image in it
            return "a folder"
        lines = index.report.lines
        empty = kind == "empty" and target.suffix == ".txt"
        told = any(file in line for line in lines)
        assert told or empty, f"{file} ({kind}) is nowhere in the report: {list(lines)}"
        if kind in ("loop", "dangling") and target.suffix in (".txt", ".xml"):
            assert index.report.totals.get(NO_LABEL) == 1
        return "named in the report"

    def others(self, case: Case, root: Path, which: str, kind: str) -> str:
        runs = self.world / "runs" / "exp"
        path = case.folder / which
        make = fuzz_inputs.make_odd_kind
        if which in ("index", "damaged", "lmdb"):
            cache = case.folder / "cache"
            index = scan(root, "yolo", cache)
            stem = f"train-{index.fingerprint}"
            if which == "lmdb":
                disk_cache._environment.cache_clear()
                path = cache / f"lockstep-{os.getuid()}-{index.fingerprint}-64-v{disk_cache._LAYOUT}.lmdb"
                make(path, kind)

                def read() -> list[np.ndarray]:
                    held = open_image_cache(index, "disk", imgsz=64, cache_dir=str(cache))
                    return [held[i] for i in range(len(index))]

                found = attempt(read)
                return found.names(path) if isinstance(found, Refused) else "made anew"
            make(cache / f"{stem}.{which}", kind)
            again = attempt(lambda: scan(root, "yolo", cache))
            assert isinstance(again, DatasetIndex), again
            same_index(index, again)
            damaged = DamagedImages(again, "train", cache_dir=str(cache), max_bad=1.0)
            damaged.add(again.path(0), "Corrupt")
            damaged.check()
            assert any("a.png is damaged" in line for line in case.said)
            return "the index of a scan"
        if which == "results.csv":
            shutil.copy(runs / "results.csv", path)
            make(path, kind)
            done = attempt(lambda: CsvTracker(path).epoch(3, {"x": 1.0}))
            return done.names(path) if isinstance(done, Refused) else "goes on"
        if which == "source":
            path = case.folder / "x.jpg"
            shutil.copy(root / "images" / "train" / "c.jpg", path)
            make(path, kind)
            done = attempt(lambda: read_image(path))
            return done.names(path)
        shutil.copy({"hyp.yaml": self.world / "tiny.yaml", "model.yaml": self.world / "tiny.yaml"}.get(
            which, runs / "last.pt"), path)  # fmt: skip
        make(path, kind)
        read = {
            "hyp.yaml": lambda: read_recipe(str(path), pretrained=False),
            "model.yaml": lambda: load_spec(path),
            "last.pt": lambda: Checkpoint.read(path),
            "x.safetensors": lambda: read_weights(path),
        }[which]
        done = attempt(read)
        if which == "hyp.yaml" and kind == "empty":
            assert done == Hyperparameters()
            return "defaults"
        return done.names(path)


# Folders and exports without a YAML


class Exports(Target):
    """A changed export of an annotation tool: refused in a line that names a file of it, with nothing written, or
    converted to a data set whose objects are those of the table."""

    name, weight = "tool-exports", 3.0

    def prepare(self, seeds: Path) -> None:
        self.root = seeds / self.name
        for kind, write in WRITERS.items():
            if kind == "huggingface" and find_spec("pyarrow") is None:
                continue
            (self.root / kind).mkdir(parents=True)
            for name, (width, height) in EXPORTED.items():
                cv2.imwrite(str(self.root / kind / name), np.full((height, width, 3), 90, np.uint8))
            write(self.root / kind)

    def run(self, case: Case) -> str:
        chance, root, out = case.chance, case.folder / "set", case.folder / "out" / "coco.json"
        kind = chance.choice(sorted(os.listdir(self.root)))
        shutil.copytree(self.root / kind, root)
        path = chance.choice(sorted(p for p in root.rglob("*") if p.is_file() and p.suffix != ".png"))
        if chance.random() < 0.1:
            what = chance.choice(fuzz_inputs.ODD_KINDS)
            fuzz_inputs.make_odd_kind(path, what)
        elif chance.random() < 0.2 and (
            shapes := re.findall(rb"<(box|polygon)|(rectangle|polygon)", path.read_bytes())
        ):
            shape = chance.choice([word for words in shapes for word in words if word])
            what = chance.choice((b"polyline", b"points", b"point", b"skeleton", b"line", b"tag", b"x y"))
            path.write_bytes(path.read_bytes().replace(shape, what, chance.choice((1, -1))))
        else:
            data, what = self.change(path, chance)
            path.write_bytes(data)
        case.said.append(f"{kind}: {path.name}: {what}")
        lines = attempt(lambda: convert(root, out))
        if isinstance(lines, Refused):
            assert not [*out.parent.rglob("*")], "half an output"
            return lines.names(path, root, *root.iterdir())
        spec, boxes, told = load_dataset_spec(out.with_suffix(".yaml")), 0, False
        for split in spec.splits:
            index = load_index(spec, split, cache_dir=str(case.folder / "cache"), workers=0, progress=False)
            boxes, told = boxes + len(index.classes), told or len(index.report.lines) > 0
        first = next(number for number, line in enumerate(lines) if line.split()[:2] == ["class", "export"])
        counts = [line.split()[-1] for line in lines[first + 1 : first + 1 + len(spec.names)]]
        assert told or boxes == sum(map(int, counts)), f"{boxes} boxes train of those in {lines}"
        return "converted"

    @staticmethod
    def change(path: Path, chance: random.Random) -> fuzz_inputs.Change:
        data = path.read_bytes()
        if chance.random() < 0.3:
            return fuzz_inputs.change_bytes(data, chance)
        if path.suffix == ".xml":
            return fuzz_inputs.change_xml(data, chance)
        if path.suffix == ".json":
            return fuzz_inputs.change_json(data, chance)
        if path.suffix == ".parquet":
            return change_parquet(path, chance)
        separator = b"," if path.suffix == ".csv" else b" "
        lines = data.split(b"\n")
        at = chance.randrange(len(lines))
        fields = lines[at].split(separator)
        text = chance.choice((*fuzz_inputs.NUMBER_TEXTS, '"', '"a', "x" * 200_000, "a,b,c", "", "/m/01yrx", "../x.png"))
        fields[chance.randrange(len(fields))] = text.encode("utf-8", "surrogatepass")
        lines[at] = separator.join(fields)
        return b"\n".join(lines), f"line {at} has {text[:40]!r}"


def change_parquet(path: Path, chance: random.Random) -> fuzz_inputs.Change:
    """Other types of a column, or other metadata."""
    import pyarrow
    from pyarrow import parquet

    table = parquet.read_table(path)
    if chance.random() < 0.5:
        metadata, what = fuzz_inputs.change_json(table.schema.metadata[b"huggingface"], chance)
        table = table.replace_schema_metadata(
            {"huggingface": metadata * chance.choice((1, 1, 1, 1 + 10**6 // len(metadata)))}
        )
    else:
        odd = chance.choice((None, 7, "x", b"x", [], [1.5], [[1, 2, 3]], [[1, 2, 3, float("nan")]], [["1"] * 4],
                             {"bytes": None}, {"bytes": b""}, {"bytes": b"x" * 1000}, {"bbox": None}, {"bbox": [None]},
                             {"bbox": [[1, 2, 3, 4]], "category": []}, {"bbox": [[1, 2, 3, 4]], "category": [2**62]},
                             {"bbox": [[1, 2, 3, 4]], "category": ["cat"]}, {"bbox": 5, "category": 6}, [{"x": 1}],
                             [None], {"bbox": [[1e308, 0, 1e308, 1]], "category": [-1]}))  # fmt: skip
        column = chance.choice(("image", "objects"))
        rows = [row | {column: odd} for row in table.to_pylist()]
        table, what = pyarrow.Table.from_pylist(rows).replace_schema_metadata(table.schema.metadata), f"{column}: {odd}"
    buffer = io.BytesIO()
    parquet.write_table(table, buffer)
    return buffer.getvalue(), what[:100]


class Folders(Target):
    """``--data FOLDER``: a changed, odd or circular file in a folder without a YAML is refused by name, or reported, or
    all images train; and a check reads the same."""

    name, weight = "folders", 2.0

    def prepare(self, seeds: Path) -> None:
        self.root = seeds / self.name
        write_labeled(self.root / "all")
        for kind in ("yolo", "coco", "voc"):
            root, images = self.root / kind, self.root / kind / "train"
            shutil.copytree(self.root / "all" / "images" / "train", images)
            if kind == "yolo":
                shutil.copytree(self.root / "all" / "labels" / "train", images, dirs_exist_ok=True)
                (root / "classes.txt").write_text("".join(f"{name}\n" for name in NAMES))
            elif kind == "voc":
                shutil.copytree(self.root / "all" / "voc", images, dirs_exist_ok=True)
            else:
                shutil.copy(self.root / "all" / "instances.json", images / "_annotations.coco.json")

    def run(self, case: Case) -> str:
        chance, root = case.chance, case.folder / "set"
        kind = chance.choice(("yolo", "coco", "voc"))
        shutil.copytree(self.root / kind, root)
        files = sorted(p for p in root.rglob("*") if p.is_file())
        path, way = chance.choice(files), chance.random()
        if way < 0.25:
            what = chance.choice([k for k in fuzz_inputs.ODD_KINDS if k != "unreadable" or os.getuid()])
            fuzz_inputs.make_odd_kind(path, what)
        elif way < 0.4:  # links in circles, and one folder under several names
            path = root / chance.choice(("train/again", "val", "test", "images", "train/labels", "annotations"))
            path.symlink_to(chance.choice((root, root / "train", path, Path(".."))), target_is_directory=True)
            what = "a link"
        elif way < 0.45:
            path = root / chance.choice(("val.txt", "train.txt", "ImageSets/Main/val.txt", "notes.json", "data.yml"))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(chance.choice((root / "gone", root / "train" / "a.png", path)))
            what = "a link to nothing, to an image or to itself"
        elif way < 0.5:
            path = root / chance.choice(("valid", "labels", "annotations", "data.yaml", "train/b.json", "obj.names"))
            path.mkdir() if chance.random() < 0.4 else path.write_bytes(chance.randbytes(chance.choice((0, 40, 5000))))
            what = "a file or folder more"
        else:
            data = path.read_bytes()
            change = {".xml": fuzz_inputs.change_xml, ".json": fuzz_inputs.change_json}.get(path.suffix)
            data, what = change(data, chance) if change and way < 0.8 else fuzz_inputs.change_bytes(data, chance)
            path.write_bytes(data)
        case.said.append(f"{kind}: {path.name}: {what}")
        spec = attempt(lambda: load_dataset_spec(root))
        if isinstance(spec, Refused):
            return spec.names(path, root)
        verdicts = {self.scanned(case, root, spec, split, path) for split in spec.splits}
        return sorted(verdicts)[-1]

    @staticmethod
    def scanned(case: Case, root: Path, spec: DatasetSpec, split: str, path: Path) -> str:
        cache = str(case.folder / "cache")
        index = attempt(lambda: load_index(spec, split, cache_dir=cache, workers=0, progress=False, max_bad=1.0))
        if isinstance(index, Refused):
            return index.names(path, root, *root.iterdir(), *(root / "train").iterdir())
        told = any(path.name in line for line in (*index.report.lines, *case.said[1:]))
        told |= path.name == "classes.txt" and len(index.report.lines) > 0  # which then name the label files
        assert told or len(index) >= len(SIZES), f"{path.name} is left out in silence"
        (checked,) = scan_dataset(spec, (split,), workers=0, verify="sample")
        same_index(index, checked.index)
        scan_issues(checked), box_pairs(checked)  # which name places in the label files
        return "scanned"


# Whole programs


def run_script(main: Callable, *argv: Any, folder: Path) -> tuple[int, str, str]:
    """Runs an entry script in this process: its exit status, standard output and standard error."""
    code = 0
    logger = get_logger()
    kept = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:] = []
    with open(folder / "out.txt", "w+b") as out, open(folder / "err.txt", "w+b") as err:
        sys.stdout.flush()
        sys.stderr.flush()
        streams = sys.stdout, sys.stderr
        with _descriptor(1, out.fileno()), _descriptor(2, err.fileno()):
            sys.stdout, sys.stderr = (open(n, "w", closefd=False, errors="backslashreplace") for n in (1, 2))  # noqa: SIM115
            try:
                run_main(main, [str(a) for a in argv])
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
            except BaseException:
                code = 1
                traceback.print_exc()
            finally:
                for handler in logger.handlers:
                    handler.close()
                logger.handlers[:], logger.level, logger.propagate = kept
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                sys.stdout, sys.stderr = streams
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    return code, texts[0], texts[1]


class Programs(Target):
    """train.py, val.py and detect.py with one changed file: exit 2 and one line that names it, or exit 0."""

    name, weight, deadline_s = "programs", 0.25, 40.0  # a training takes seconds, and the machine may be busy

    def prepare(self, seeds: Path) -> None:
        self.world = Runs.folder(seeds)
        self.pictures = _pictures()
        self.checkpoints, self.safetensors = Checkpoints(), Safetensors()
        self.checkpoints.prepare(seeds)
        self.safetensors.prepare(seeds)

    def run(self, case: Case) -> str:
        chance = case.chance
        root = case.folder / "world"
        shutil.copytree(self.world, root, ignore=shutil.ignore_patterns("cache"))
        flags = ["--project", case.folder / "out", "--cache-dir", case.folder / "cache", *SMALL]
        begin = [
            "--data",
            root / "yolo.yaml",
            "--model",
            root / "tiny.yaml",
            "--epochs",
            "1",
            "--max-bad",
            "0.6",
            *flags,
        ]
        runs = root / "runs" / "exp"
        what = chance.choice(("label", "image", "yaml", "model", "hyp", "resume", "results", "val", "detect", "source",
                              "coco", "weights", "list"))  # fmt: skip
        main = train.main
        if what == "label":
            path, argv = root / "labels" / "train" / "a.txt", begin
            data, how = self.any_change(path, chance, fuzz_inputs.change_rows)
        elif what == "image":
            path, argv = root / "images" / "train" / "c.jpg", begin
            data, how = fuzz_inputs.change_bytes(self.pictures["large.jpg"], chance)
        elif what in ("yaml", "model"):
            path, argv = root / ("yolo.yaml" if what == "yaml" else "tiny.yaml"), begin
            data, how = self.any_change(path, chance, fuzz_inputs.change_yaml)
        elif what == "hyp":
            path, argv = root / "hyp.yaml", [*begin, "--hyp", root / "hyp.yaml"]
            shutil.copy(Path(__file__).parents[2] / "configs" / "hyp" / "scratch.yaml", path)
            data, how = self.any_change(path, chance, fuzz_inputs.change_yaml)
        elif what in ("resume", "results"):
            path, argv = runs / ("last.pt" if what == "resume" else "results.csv"), ["--resume", runs, "--epochs", "2"]
            argv += ["--cache-dir", case.folder / "cache", "--data", root / "yolo.yaml"]
            if what == "resume" and chance.random() < 0.5:
                how = self.checkpoints.write_other_values(path, chance)
                data = path.read_bytes()
            else:
                data, how = fuzz_inputs.change_bytes(path.read_bytes(), chance)
        elif what == "coco":
            path, argv = root / "instances.json", [*begin, "--data", root / "coco.yaml"]
            data, how = self.any_change(path, chance, fuzz_inputs.change_json)
        elif what == "list":
            path, argv = root / "list.txt", [*begin, "--data", root / "list.yaml"]
            path.write_text("".join(f"images/train/{n}\n" for n in SIZES))
            (root / "list.yaml").write_text("train: list.txt\nval: images/train\nnames: [light, dark]\n")
            data, how = fuzz_inputs.change_bytes(path.read_bytes(), chance)
        elif what == "source":
            name = chance.choice(list(self.pictures))
            path = case.folder / "pictures" / name
            path.parent.mkdir()
            (path.parent / "sound.jpg").write_bytes(self.pictures["photo.jpg"])
            main = detect.main
            argv = ["--weights", runs / "best.pt", "--source", path.parent, "--project", case.folder / "out",
                    "--device", "cpu", "--save-txt"]  # fmt: skip
            data, how = fuzz_inputs.change_bytes(self.pictures[name], chance)
        else:
            suffix = chance.choice((".pt", ".safetensors"))
            path = case.folder / f"weights{suffix}"
            if suffix == ".pt":
                data, how = fuzz_inputs.change_bytes(self.checkpoints.files["best.pt"], chance)
            else:
                data, how = fuzz_inputs.change_safetensors(self.safetensors.files["own.safetensors"], chance)
            main = {"val": val.main, "detect": detect.main, "weights": train.main}[what]
            argv = {
                "val": ["--weights", path, "--data", root / "yolo.yaml", *flags[:4], "--device", "cpu",
                        "--workers", "0", "--noplots"],
                "detect": ["--weights", path, "--source", root / "images" / "train", *flags[:2], "--device", "cpu"],
                "weights": [*begin, "--weights", path],
            }[what]  # fmt: skip
        case.said.append(f"{what}: {how}")
        path.write_bytes(data)
        return self.judge(*run_script(main, *argv, folder=case.folder), path, root)

    @staticmethod
    def any_change(path: Path, chance: random.Random, change: Callable) -> fuzz_inputs.Change:
        data = path.read_bytes()
        return fuzz_inputs.change_bytes(data, chance) if chance.random() < 0.3 else change(data, chance)

    @staticmethod
    def judge(code: int, out: str, err: str, path: Path, root: Path) -> str:
        assert "Traceback" not in out + err, f"{err}\n{out}"[-3000:]
        if code == 0:
            assert err == "", err[-2000:]
            return "exit 0"
        assert code == 2, f"exit {code}: {err[-2000:]}"
        lines = list(filter(None, err.splitlines()))  # OpenJPEG, which is not shown, prints blank lines
        assert len(lines) == 1, err[-2000:]
        assert lines[0].startswith("error: ")
        files = (path, "data.yaml", *root.rglob("*")) if path.suffix in (".yaml", ".txt", ".json") else (path,)
        Refused(lines[0]).names(*files)
        return "exit 2 and a line"


TARGETS: dict[str, type[Target]] = {
    t.name: t
    for t in (Images, YoloLabels, VocLabels, CocoLabels, DataYaml, RecipeYaml, CommandLines, ModelYaml, Checkpoints,
              Safetensors, ExportedFiles, IndexCache, ImageCache, ShardSets, Stores, Results, OddKinds, Exports,
              Folders, Programs)
}  # fmt: skip


def captured() -> list[str]:
    """A list that receives the messages that the program logs from now on in this process."""
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger = get_logger()
    logger.handlers[:] = [Handler()]
    logger.propagate = False
    logger.setLevel(logging.INFO)
    return said


def is_plain(path: Path) -> bool:
    """Whether a file of a finding can be kept: a pipe or a sparse file of a terabyte cannot."""
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_size < 2**26
