"""The targets of the fuzzer (`TARGETS`, at the end), and the required outcome of each input.

A target changes one file in a folder of its own, and calls the program on it as its scripts do. What is right is
decided here, by other means: labels are parsed once more, strictly, by other code; a picture that is taken in silence
must be one of which OpenCV, asked directly, and Pillow have nothing to complain; caches must give what their sources
give; a checkpoint the tensors that were saved. Whatever else must end in one line that names the file.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import math
import os
import random
import re
import shutil
import struct
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
import yaml
from PIL import Image

from data.cache import disk as disk_cache
from data.image_io.decode import read_image, read_source, reduced_sizes
from data.image_io.verify import check_image
from data.index.index import DatasetIndex
from data.labels.findings import NO_LABEL
from data.source.dataset_yaml import load_dataset_spec
from data.source.files import list_split
from engine.checkpoint.checkpoint import Checkpoint
from engine.hooks.writers import ResultsCsv
from engine.run.restore import EpochData, resumed_position
from engine.run.resume import resumed_config, resumed_hyperparameters
from models.detector import build_on_meta
from models.spec import load_spec
from models.weights.load import load_detector
from models.weights.read import read_weights
from tests.helpers.hostile_files import opcode_call, tensor_program, zip_around
from tests.helpers.same_content import same_content
from tests.robustness import fuzz_inputs
from tests.robustness.fuzz_inputs import change_bytes
from tests.robustness.fuzz_labels import (
    NAMES,
    SIZES,
    OddJsonError,
    Reading,
    judge_boxes,
    strict_coco,
    strict_voc,
    strict_yolo,
)
from tests.robustness.fuzz_world import REPOSITORY, World, cached_pixels, scan
from utils.config.parser import read_recipe
from utils.config.settings import Hyperparameters, TrainConfig
from utils.errors import UserError
from utils.files.array_file import open_arrays, write_arrays
from utils.files.checkpoint_file import read_checkpoint, read_safetensors
from utils.logger import get_logger

MOST_CHARACTERS = 2000  # of a line
REFUSED = "refused in a line"


class Case:
    """One input: its random numbers, an empty folder of its own, the valid files, and what the program has logged."""

    def __init__(self, chance: random.Random, folder: Path, world: World) -> None:
        self.chance, self.folder, self.world = chance, folder, world
        self.said: list[str] = []
        self.files: list[Path | str] = []  # of which a line may name any

    def copy(self, source: Path, name: str = "set") -> Path:
        return shutil.copytree(source, self.folder / name)

    def write(self, path: Path, changed: fuzz_inputs.Change) -> None:
        """Writes a changed file, which a line may name from now on."""
        data, what = changed
        self.said.append(f"{path.name}: {what}")
        self.files.append(path)
        path.write_bytes(data)

    def change(
        self,
        path: Path,
        share: float = 0.35,
        others: Sequence[bytes] = (),
        by: Callable[[bytes, random.Random], fuzz_inputs.Change] | None = None,
    ) -> None:
        """Changes a file: with probability ``share`` its bytes, else its values by ``by``, which follows from its
        suffix if there is such a change."""
        data, by = path.read_bytes(), by or fuzz_inputs.BY_SUFFIX.get(path.suffix)
        if by is None or self.chance.random() < share:
            self.write(path, change_bytes(data, self.chance, list(others)))
        else:
            self.write(path, by(data, self.chance))

    def make_odd(self, path: Path, kinds: Sequence[str] = fuzz_inputs.ODD_KINDS) -> str:
        kind = self.chance.choice([kind for kind in kinds if kind != "unreadable" or os.getuid()])
        self.said.append(f"{path.name} is {kind}")
        self.files.append(path)
        fuzz_inputs.make_odd_kind(path, kind)
        return kind

    def check_line(self, error: UserError) -> str:
        """Checks that the line with which the program would end names one of the files, and returns the verdict."""
        line = " ".join(str(error).split())
        assert any(os.path.basename(file) in line for file in self.files), f"names no file: {line[:300]}"
        assert len(line) <= MOST_CHARACTERS, f"a line of {len(line)} characters: {line[:300]}"
        return REFUSED

    def attempt(self, call: Callable[[], Any]) -> Any:
        """The result of ``call``, or REFUSED if it ends in a line that names a file."""
        try:
            return call()
        except UserError as error:
            return self.check_line(error)


@contextlib.contextmanager
def must_work() -> Iterator[None]:
    """Where a line is a finding."""
    try:
        yield
    except UserError as error:
        raise AssertionError(error) from None


class Target(NamedTuple):
    """A kind of file. ``run`` tries one input and returns a short verdict; it raises any exception for a finding, and
    a UserError where the program would end with its line. ``needs`` is what it uses of the `World`."""

    run: Callable[[Case], str]
    needs: tuple[str, ...] = ()
    weight: float = 1.0  # how often it is tried, relative to the others
    deadline_s: float = 10.0


# Pictures


def images(case: Case) -> str:
    """A changed image: refused by the scan, reported by name when it is used, or one whose change no decoder can
    notice."""
    chance, pictures = case.chance, case.world.pictures
    path = case.folder / chance.choice(list(pictures))
    same_kind = [d for n, d in pictures.items() if n != path.name and Path(n).suffix == path.suffix]
    data, what = change_bytes(pictures[path.name], chance, same_kind)
    if path.suffix == ".png" and chance.random() < 0.4:
        data, what = _with_true_sums(data), f"{what}, CRCs put right"
    case.write(path, (data, what))
    verdict = ""
    for decode in (False, True):
        size = case.attempt(lambda: check_image(path, decode=decode))  # noqa: B023 (called at once)
        if size is REFUSED:
            verdict = verdict or REFUSED
            continue
        complaints: list[str] = []
        image = case.attempt(lambda: read_image(path, lambda p, text: complaints.append(f"{p}: {text}")))  # noqa: B023
        if decode:
            assert image is not REFUSED, "passes a full check, and is refused then"
            assert not complaints, f"passes a full check, then: {complaints}"
        if image is REFUSED:
            verdict = REFUSED
            continue
        source_hw = reduced_sizes(np.array([size]), 64)[0]
        with must_work():
            source = read_source(str(path), np.array(size), source_hw)
        assert source.shape == (*source_hw, 3)
        assert image.shape == (*size, 3), f"the scan says {size}, the decoder {image.shape}"
        assert image.dtype == np.uint8
        assert not complaints or path.name in complaints[0]
        verdict = "complained of by name" if complaints else check_silence(pictures[path.name], path, what, decode)
    return verdict


def check_silence(original: bytes, path: Path, what: str, is_decoded: bool) -> str:
    data = path.read_bytes()
    pixels, printed = _directly(data)
    assert pixels is not None, "OpenCV alone does not decode it"
    assert not re.search(r"Corrupt JPEG|Premature end|libpng error|(?i:error|truncated|corrupt)", printed), printed
    if np.array_equal(pixels, _directly(original)[0]):
        return "the same pixels"
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        assert _with_true_sums(data) == data, "a wrong CRC in a PNG"
    assert what != "truncate", "truncated, and other pixels, in silence"
    # The scan detects damage of a decoded JPEG that OpenCV does not report, but not of JPEG 2000.
    problem = _strictly(data) if is_decoded and path.suffix != ".jp2" else ""
    assert not problem, f"Pillow refuses it: {problem}"
    return "other pixels that no decoder complains of"


def _directly(data: bytes) -> tuple[np.ndarray | None, str]:
    """What OpenCV decodes, and what it prints meanwhile."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED | cv2.IMREAD_IGNORE_ORIENTATION)
        except cv2.error:
            image = None
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        return image, file.read().decode("latin-1")


def _strictly(data: bytes) -> str:
    """What Pillow reports about an image; only what means missing or wrong data."""
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


def label_file(root: Path, kind: str, name: str) -> Path:
    if kind == "coco":
        return root / "instances.json"
    folder, suffix = {"yolo": ("labels/train", ".txt"), "voc": ("voc", ".xml")}[kind]
    return (root / folder / name).with_suffix(suffix)


def readings(root: Path, kind: str) -> dict[str, Reading]:
    """The labels of each image as a strict reader reads them."""
    files = {name: label_file(root, kind, name).read_bytes() for name in SIZES}
    if kind == "yolo":
        return {name: strict_yolo(data, *SIZES[name]) for name, data in files.items()}
    if kind == "voc":
        return {name: strict_voc(data) for name, data in files.items()}
    try:
        return strict_coco(files["a.png"])
    except OddJsonError as error:
        raise AssertionError(f"taken, though {error}") from None
    except (TypeError, AttributeError, KeyError):  # annotations that are not JSON objects
        return {name: Reading([], True) for name in SIZES}


def labels(case: Case, kind: str) -> str:
    """Changed labels: the boxes are those that a strict reader reads, or the file is reported."""
    root, changed = case.copy(case.world.labeled), case.chance.choice(list(SIZES))
    others = [label_file(root, kind, name).read_bytes() for name in SIZES]
    path = label_file(root, kind, changed)
    case.change(path, others=others, by=fuzz_inputs.change_rows if kind == "yolo" else None)
    index = scan(root, kind, case.folder / "cache")
    verdicts, read = {}, readings(root, kind)
    for name in SIZES:
        if name in read:
            verdicts[name] = judge_boxes(index, name, read[name], label_file(root, kind, name).name)
        else:
            assert any(name in line for line in index.report.lines), f"{name} is left out in silence"
            verdicts[name] = "left out by name"
    return verdicts[changed]


# YAML


def read_plainly(path: Path, *, as_written: bool = False) -> Any:
    """What a YAML file that was taken says. PyYAML's Python parser reads it, unlike the program's libyaml, unless there
    are tabs, where it is too strict. No key may be there twice. ``as_written``: numbers and the like stay text."""

    def check(node: yaml.Node) -> None:
        if isinstance(node, yaml.MappingNode):
            keys = [(k.tag, k.value) for k, _ in node.value if isinstance(k, yaml.ScalarNode)]
            assert len(keys) == len(set(keys)), "a key twice, in silence"
        for child in node.value if isinstance(node.value, list) else ():
            for part in child if isinstance(child, tuple) else (child,):
                check(part)

    text = path.read_text(encoding="utf-8-sig")
    loader = yaml.CSafeLoader if "\t" in text else yaml.SafeLoader
    root = yaml.compose(text, Loader=loader)
    if root is not None:
        check(root)
    if as_written:
        loader = yaml.CBaseLoader if "\t" in text else yaml.BaseLoader
    return yaml.load(text, Loader=loader)


def data_yaml(case: Case) -> str:
    """A changed YAML of a data set: refused, or read as a plain reader reads it."""
    root, path = case.world.labeled, case.folder / "changed.yaml"
    text = (root / f"{case.chance.choice(('yolo', 'voc', 'coco'))}.yaml").read_text()
    path.write_text(text.replace("path: .", f"path: {root}") + "download: x\n")
    case.change(path)
    case.files += [root, *(p.name for p in root.rglob("*"))]
    spec = load_dataset_spec(path)
    listing = list_split(spec, "train")
    names = read_plainly(path, as_written=True).get("names")
    if isinstance(names, dict):
        by_number = {int(number): name for number, name in names.items()}
        names = [by_number[i] for i in range(len(by_number))]
    if names:
        assert spec.names == tuple(name.strip() for name in names), spec.names
    assert [i.name.rsplit("/", 1)[-1] for i in listing.images] == sorted(SIZES)
    return "taken as it says"


def recipe(case: Case) -> str:
    path = case.folder / "changed.yaml"
    shutil.copy(REPOSITORY / "configs" / "hyp" / "scratch.yaml", path)
    case.change(path)
    result = read_recipe(str(path), pretrained=False)
    assert isinstance(result, Hyperparameters)
    for key, value in (read_plainly(path) or {}).items():
        held = getattr(result, key)
        assert held == value or held == float(value), f"{key}: {value!r} becomes {held!r}"
    return "taken as it says"


def model(case: Case) -> str:
    path = case.folder / "changed.yaml"
    others = (REPOSITORY / "configs" / "models").glob("yolo*8.yaml")
    shutil.copy(case.chance.choice([case.world.labeled / "tiny.yaml", *sorted(others)]), path)
    case.change(path)
    build_on_meta(load_spec(path), 2, NAMES)
    read_plainly(path)
    return "built"


# Checkpoints


def checkpoints(case: Case) -> str:
    """A damaged checkpoint is refused, or gives what was saved. A hostile one, or one with replaced values, may do no
    worse than be refused."""
    chance, files, kind = case.chance, case.world.checkpoints, case.chance.random()
    is_damage = kind < 0.6
    path = case.folder / ("last.pt" if 0.6 <= kind < 0.85 else chance.choice(list(files)))
    if is_damage:
        case.write(path, change_bytes(files[path.name], chance, [d for n, d in files.items() if n != path.name]))
    else:
        case.files.append(path)
        write = write_other_values if kind < 0.85 else functools.partial(write_hostile, original=files[path.name])
        case.said.append(f"{path.name}: {write(path, chance, case.world.last)}")
    own = case.attempt(lambda: read_checkpoint(path)) if path.name != "foreign.pt" else None
    if path.name == "last.pt":
        case.attempt(lambda: resume(path))
    original = case.folder / "original.pt"
    original.write_bytes(files[path.name])
    if is_damage and own not in (None, REFUSED):
        same_content(own, read_checkpoint(original))
    stored = read_weights(path)
    if is_damage:
        assert own is not REFUSED
        same_content(stored.tensors, read_weights(original).tensors)
    load_detector(path)
    return "what was saved" if is_damage else "loaded"


def resume(path: Path) -> None:
    """Does what --resume does with a checkpoint before anything is built."""
    checkpoint, flags = Checkpoint.read(path), TrainConfig()
    config, _ = resumed_config(checkpoint.config, flags, ())
    resumed_hyperparameters(checkpoint.hyp, flags, (), pretrained=False)
    resumed_position(checkpoint, replace(config, batch_size=4), EpochData(batches=1, images=1, fingerprint=""))


def write_other_values(path: Path, chance: random.Random, last: dict[str, Any]) -> str:
    """Writes a checkpoint with another plain value, or other tensors."""
    of_tensors = ("model", "ema", "optimizer", "scaler", "rank_buffers")
    plain = json.dumps({key: value for key, value in last.items() if key not in of_tensors}).encode()
    while True:
        changed, what = fuzz_inputs.change_json(plain, chance)
        with contextlib.suppress(ValueError, RecursionError):
            tree = json.loads(changed)
            break
    if isinstance(tree, dict):
        tree |= {key: last[key] for key in of_tensors if key in last and chance.random() < 0.95}
        if chance.random() < 0.2:
            key = chance.choice([k for k in of_tensors[:4] if last.get(k)])
            tree[key], what = other_tensors(last[key], chance)
    with contextlib.suppress(RecursionError):
        torch.save(tree, path)
    return what


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


def write_hostile(path: Path, chance: random.Random, _: dict[str, Any], *, original: bytes) -> str:
    """Writes a program in place of a checkpoint, false sizes of a tensor, or entries that were changed with care."""
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
    with zipfile.ZipFile(io.BytesIO(original)) as archive:
        entries = {e.filename: archive.read(e) for e in archive.infolist()}
    program = next(n for n in entries if n.endswith("data.pkl"))
    chosen = program if chance.random() < 0.75 else chance.choice(list(entries))
    what = "is missing"
    if kind in (2, 3, 4):  # with a true checksum
        entries[chosen], what = change_bytes(entries[chosen], chance)
    else:
        entries.pop(chosen)
    compression = chance.choice((zipfile.ZIP_STORED,) * 4 + (zipfile.ZIP_DEFLATED,))
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", compression) as archive:
        warnings.simplefilter("ignore")  # two entries of a name
        for name, data in entries.items():
            for _ in range(2 if kind == 4 and name == chosen else 1):
                archive.writestr(name, data)
    return f"{chosen} {what}"


def safetensors(case: Case) -> str:
    """A changed safetensors file is refused, or gives the tensors that a plain reader finds in it."""
    files = case.world.safetensors
    path = case.folder / case.chance.choice(list(files))
    path.write_bytes(files[path.name])
    case.change(path, 0.4, [data for name, data in files.items() if name != path.name])
    found = case.attempt(lambda: read_safetensors(path))
    if found is not REFUSED:
        compare_tensors(found[0], path.read_bytes())
    load_detector(path)
    assert found is not REFUSED
    return "the tensors that it holds"


def compare_tensors(tensors: dict[str, torch.Tensor], data: bytes) -> None:
    dtypes = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "U8": "uint8", "I64": "int64",
              "I32": "int32", "I16": "int16", "I8": "int8", "BOOL": "bool"}  # fmt: skip
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    assert header.keys() == tensors.keys()
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes() if end > begin else b""
        assert raw == data[8 + length + begin : 8 + length + end], name
        assert list(tensors[name].shape) == entry["shape"]
        assert str(tensors[name].dtype) == f"torch.{dtypes[entry['dtype']]}"


# Caches


def same_index(a: DatasetIndex, b: DatasetIndex) -> None:
    assert list(a.paths) == list(b.paths)
    assert list(a.report.lines) == list(b.report.lines)
    assert a.fingerprint == b.fingerprint
    for name in ("image_hw", "offsets", "boxes_xywh_px", "classes", "crowd", "area_px"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name


def index_cache(case: Case) -> str:
    """Whatever the cache files contain, the index equals that of a scan."""
    root, source, expected = case.world.index_cache
    cache = case.copy(source, "cache")
    path = case.chance.choice(sorted(cache.iterdir()))
    if path.suffix == ".index" and case.chance.random() < 0.3:  # as another version could write it
        meta, arrays = open_arrays(path)
        write_arrays(path, meta | {"version": case.chance.choice(([1, 1], [3, 2], None, "x", 2))}, arrays)
        case.said.append("another version")
    else:
        case.change(path, 1.0, [p.read_bytes() for p in cache.iterdir()])
    with must_work():
        same_index(scan(root, "yolo", cache), expected)
    return "the index of a scan"


def image_cache(case: Case) -> str:
    """A damaged disk cache gives the pixels of the files, is created again, or is refused by name."""
    index, files, pixels = case.world.image_cache
    copies = [Path(shutil.copy2(file, case.folder)) for file in files]  # with the times, by which a cache is known
    case.files += copies
    case.change(case.chance.choice(copies), 1.0)
    disk_cache._environment.cache_clear()
    for i, (a, b) in enumerate(zip(cached_pixels(index, case.folder), pixels)):
        assert np.array_equal(a, b), f"image {i}: other pixels"
    return "the pixels of the files"


# What kind of file it is


def kinds(case: Case) -> str:
    """Pipes, folders, circular links and the like in place of files."""
    root, chance = case.copy(case.world.labeled), case.chance
    scans = {
        "images/train/a.png": ("yolo", "voc", "coco", "list"), "labels/train/a.txt": ("yolo", "list"),
        "voc/a.xml": ("voc",), "instances.json": ("coco",), "list.txt": ("list",), "yolo.yaml": ("yolo",),
        "labels/train": ("yolo",), "images/train": ("yolo", "voc"), "voc": ("voc",), "extra": ("yolo",),
    }  # fmt: skip
    run = case.world.trained / "runs" / "exp"
    files = {
        "hyp.yaml": (root / "hyp.yaml", lambda path: read_recipe(str(path), pretrained=False)),
        "model.yaml": (root / "tiny.yaml", load_spec),
        "last.pt": (run / "last.pt", Checkpoint.read),
        "x.safetensors": (run / "last.pt", read_weights),
        "results.csv": (run / "results.csv", lambda path: ResultsCsv(path).table.write(path)),
        "x.jpg": (root / "images/train/c.jpg", read_image),
    }
    which = chance.choice((*scans, *files, "index", "lmdb"))
    if which in scans:
        path = root / which
        if which == "extra":
            path = root / chance.choice(("images/train/x.jpg", "labels/train/x.txt", "images/train/x.txt"))
            path.write_bytes(b"x")
        elif path.is_dir():
            shutil.rmtree(path)
            path.write_bytes(b"x")
        kind = case.make_odd(path)
        case.files += ["data", path.parent]
        return judge_kind(scan(root, chance.choice(scans[which]), case.folder / "cache"), path, kind)
    if which not in files:
        return odd_cache(case, root, which)
    path, (source, read) = case.folder / which, files[which]
    shutil.copy(source, path)
    kind, result = case.make_odd(path), read(path)
    if which == "results.csv":
        return "goes on"
    assert (which, kind) == ("hyp.yaml", "empty"), "is read"
    assert result == Hyperparameters()
    return "defaults"


def judge_kind(index: DatasetIndex, path: Path, kind: str) -> str:
    if path.name.startswith("x."):
        assert len(index) >= len(SIZES)
        return "the others as they are"
    if kind == "full folder" and path.suffix == ".png":  # a folder among the folders, with the image in it
        return "a folder"
    told = any(path.name in line for line in index.report.lines)
    is_empty = kind == "empty" and path.suffix == ".txt"
    assert told or is_empty, f"{path.name} ({kind}) is nowhere in the report: {list(index.report.lines)}"
    if kind in ("loop", "dangling") and path.suffix in (".txt", ".xml"):
        assert index.report.totals.get(NO_LABEL) == 1
    return "named in the report"


def odd_cache(case: Case, root: Path, which: str) -> str:
    cache = case.folder / "cache"
    index = scan(root, "yolo", cache)
    if which == "lmdb":
        disk_cache._environment.cache_clear()
        cached_pixels(index, cache)
        disk_cache._environment.cache_clear()
        (path,) = cache.glob("*.lmdb")
        case.make_odd(path, [kind for kind in fuzz_inputs.ODD_KINDS if "folder" not in kind])
        cached_pixels(index, cache)
        return "made anew"
    (path,) = cache.glob("*.index")
    case.make_odd(path.with_suffix(f".{which}"))
    with must_work():
        same_index(scan(root, "yolo", cache), index)
    return "the index of a scan"


def captured() -> list[str]:
    """A list that receives the messages that the program logs from now on in this process."""
    said: list[str] = []
    handler, logger = logging.Handler(), get_logger()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)
    return said


TARGETS = {
    "images": Target(images, ("pictures",), 3.0),
    "yolo": Target(functools.partial(labels, kind="yolo"), ("labeled",), 3.0),
    "voc": Target(functools.partial(labels, kind="voc"), ("labeled",), 2.0),
    "coco": Target(functools.partial(labels, kind="coco"), ("labeled",), 2.0),
    "data-yaml": Target(data_yaml, ("labeled",), 2.0),
    "recipe": Target(recipe),
    "model": Target(model, ("labeled",)),
    "checkpoints": Target(checkpoints, ("checkpoints", "last"), 3.0),
    "safetensors": Target(safetensors, ("safetensors",), 2.0),
    "index-cache": Target(index_cache, ("index_cache",), 1.5),
    "image-cache": Target(image_cache, ("image_cache",)),
    "kinds": Target(kinds, ("labeled", "trained")),
}
