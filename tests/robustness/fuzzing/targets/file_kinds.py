"""Pipes, folders, circular links and the like in place of files."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from data.cache.disk import mapped_environment
from data.images.decode import read_image
from data.index.index import DatasetIndex
from data.labels.findings import NO_LABEL
from engine.train.checkpoint import Checkpoint
from models.spec import load_spec
from models.weights.read import read_weights
from tests.robustness.fuzzing import inputs
from tests.robustness.fuzzing.labels import SIZES
from tests.robustness.fuzzing.targets.caches import same_index
from tests.robustness.fuzzing.targets.case import Case, must_work
from tests.robustness.fuzzing.world import cached_pixels, scan
from utils.config.recipes import read_recipe
from utils.config.settings import Hyperparameters
from utils.files.results_csv import ResultsTable

# Files of a data set, with the kinds of labels whose scan reads them.
READ_BY_SCANS = {
    "images/train/a.png": ("yolo", "voc", "coco", "list"),
    "labels/train/a.txt": ("yolo", "list"),
    "voc/a.xml": ("voc",),
    "instances.json": ("coco",),
    "list.txt": ("list",),
    "yolo.yaml": ("yolo",),
    "labels/train": ("yolo",),
    "images/train": ("yolo", "voc"),
    "voc": ("voc",),
}
SUPERFLUOUS_FILES = ("images/train/x.jpg", "labels/train/x.txt", "images/train/x.txt")
READ_ALONE = ("hyp.yaml", "model.yaml", "last.pt", "x.safetensors", "results.csv", "x.jpg")


def kinds(case: Case) -> str:
    """Pipes, folders, circular links and the like in place of files."""
    root = case.copy(case.world.labeled)
    name = case.rng.choice((*READ_BY_SCANS, "extra", *READ_ALONE, "index", "lmdb"))
    if name == "extra":
        path = root / case.rng.choice(SUPERFLUOUS_FILES)
        path.write_bytes(b"x")
        return odd_in_scan(case, root, path, ("yolo",))
    if name in READ_BY_SCANS:
        path = root / name
        if path.is_dir():
            shutil.rmtree(path)
            path.write_bytes(b"x")
        return odd_in_scan(case, root, path, READ_BY_SCANS[name])
    if name in READ_ALONE:
        return odd_alone(case, root, name)
    return odd_cache(case, root, name)


def odd_in_scan(case: Case, root: Path, path: Path, label_kinds: Sequence[str]) -> str:
    """A scan reports the odd file, or ends in a line that names it."""
    kind = case.make_odd(path)
    case.files += ["data", path.parent]
    return judge_kind(scan(root, case.rng.choice(label_kinds), case.folder / "cache"), path, kind)


def odd_alone(case: Case, root: Path, name: str) -> str:
    """The function that reads a file alone ends in a line that names it, but results.csv is started anew, and an empty
    recipe changes no default."""
    run = case.world.trained / "runs" / "exp"
    sources = {
        "hyp.yaml": root / "hyp.yaml",
        "model.yaml": root / "tiny.yaml",
        "last.pt": run / "last.pt",
        "x.safetensors": run / "last.pt",
        "results.csv": run / "results.csv",
        "x.jpg": root / "images/train/c.jpg",
    }
    readers = {
        "hyp.yaml": lambda path: read_recipe(str(path), pretrained=False),
        "model.yaml": load_spec,
        "last.pt": Checkpoint.read,
        "x.safetensors": read_weights,
        "results.csv": lambda path: ResultsTable.read(path).write(path),
        "x.jpg": read_image,
    }
    path = case.folder / name
    shutil.copy(sources[name], path)
    kind = case.make_odd(path)
    result = readers[name](path)
    if name == "results.csv":
        return "goes on"
    assert (name, kind) == ("hyp.yaml", "empty"), "is read"
    assert result == Hyperparameters()
    return "defaults"


def judge_kind(index: DatasetIndex, path: Path, kind: str) -> str:
    if path.name.startswith("x."):
        assert len(index) >= len(SIZES)
        return "the others as they are"
    if kind == "full folder" and path.suffix == ".png":  # a folder among the folders, with the image in it
        return "a folder"
    told = any(path.name in line for line in map(str, index.report.findings))
    is_empty = kind == "empty" and path.suffix == ".txt"
    assert told or is_empty, f"{path.name} ({kind}) is nowhere in the report: {list(map(str, index.report.findings))}"
    if kind in ("loop", "dangling") and path.suffix in (".txt", ".xml"):
        assert NO_LABEL not in {finding.kind for finding in index.report.findings}, "counts as an image without labels"
        assert len(index) == len(SIZES) - 1
    return "named in the report"


def odd_cache(case: Case, root: Path, which: str) -> str:
    cache = case.folder / "cache"
    index = scan(root, "yolo", cache)
    if which == "lmdb":
        mapped_environment.cache_clear()
        cached_pixels(index, cache)
        mapped_environment.cache_clear()
        (path,) = cache.glob("*.lmdb")
        case.make_odd(path, [kind for kind in inputs.ODD_KINDS if "folder" not in kind])
        cached_pixels(index, cache)
        return "made anew"
    (path,) = cache.glob("*.index")
    case.make_odd(path.with_suffix(f".{which}"))
    with must_work():
        same_index(scan(root, "yolo", cache), index)
    return "the index of a scan"
