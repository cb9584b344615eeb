"""Makes public data sets with which no setting was chosen, by the rules of public.md, for `benchmarks.accuracy`.

    python -m benchmarks.accuracy.public FOLDER [--only NAME ...] [--clones CLONES]

Each data set of public.yaml becomes FOLDER/NAME/NAME.yaml, with YOLO labels. CLONES/NAME is a Git repository that
contains the commit; if it is missing, the commit is fetched into it.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated
from xml.etree import ElementTree

import numpy as np
import yaml

from benchmarks.command import parse_flags, run_benchmark
from data.folds.near_duplicates import duplicate_groups, read_signatures
from utils.config.yaml_files import load_yaml
from utils.errors import UserError
from utils.files.safe_io import write_whole
from utils.schema import Bounds, build, check

TABLE = Path(__file__).with_name("public.yaml")
MAX_TRAIN = 200  # images
MAX_VAL = 100
MAX_CANDIDATES = 400  # training images that are compared with those of val
LABELS = {"yolo": ("labels", ".txt"), "voc": ("annots", ".xml")}  # folder beside `images`, and ending


@dataclass(frozen=True, kw_only=True)
class PublicSet:
    """A data set in a public repository. ``train`` and ``val`` are folders of images."""

    repository: str
    commit: str
    license: str
    source: str  # the page of its author, for attribution
    train: str
    val: str
    names: tuple[str, ...]
    labels: Annotated[str, Bounds(choices=tuple(LABELS))] = "yolo"
    sha256: str  # `digest` of what is made from it


def read_table(path: Path = TABLE) -> dict[str, PublicSet]:
    content = check(load_yaml(path), dict[str, dict], str(path))
    return {name: build(PublicSet, values, f"{path}: {name}") for name, values in content.items()}


def fetch_commit(public: PublicSet, clone: Path) -> None:
    """Fetches the commit into ``clone``, unless this is a repository already."""
    if not clone.exists():
        clone.mkdir(parents=True)
        _git(clone, "init", "--quiet", "--bare")
    if subprocess.run(["git", "-C", clone, "cat-file", "-e", public.commit], capture_output=True).returncode:
        _git(clone, "fetch", "--quiet", "--depth", "1", public.repository, public.commit)


def make_set(name: str, public: PublicSet, clone: Path, folder: Path) -> Path:
    """Makes the data set in ``folder``/``name``, unless it is there. Returns its YAML.

    Raises UserError if it differs from the one of the table.
    """
    root = folder / name
    path = root / f"{name}.yaml"  # written last
    if path.exists():
        return path
    shutil.rmtree(root, ignore_errors=True)  # of a run that was interrupted
    blobs = dict(_list_files(clone, public.commit))
    sources = {stem_of(image) for image, _ in _samples(blobs, public.val, public.labels)}
    val = [pair for _, pair in _one_per_source(blobs, public.val, public.labels)][:MAX_VAL]
    train = [pair for stem, pair in _one_per_source(blobs, public.train, public.labels) if stem not in sources]
    written = []
    for split, pairs in (("val", val), ("train", train[:MAX_CANDIDATES])):
        for kind in ("images", "labels"):
            (root / kind / split).mkdir(parents=True)
        for image, label in pairs:
            target = root / "images" / split / f"{blobs[image]}{PurePosixPath(image).suffix.lower()}"
            target.write_bytes(_git(clone, "cat-file", "blob", blobs[image]))
            rows = yolo_rows(_git(clone, "cat-file", "blob", blobs[label]).decode(), public)
            (root / "labels" / split / f"{blobs[image]}.txt").write_text("".join(rows))
            written.append(target)
    groups = duplicate_groups(read_signatures(list(map(str, written)), workers=1)[0])
    near_val = {int(i) for group in groups if group[0] < len(val) for i in group}
    apart = [number for number in range(len(val), len(written)) if number not in near_val][:MAX_TRAIN]
    for number in set(range(len(val), len(written))) - set(apart):
        written[number].unlink()
        (root / "labels" / "train" / f"{written[number].stem}.txt").unlink()
    found = digest(root)
    if found != public.sha256:
        raise UserError(
            f"{root}: {len(apart)} training and {len(val)} validation images with the checksum {found}, not "
            f"{public.sha256} as in {TABLE.name}; another version of OpenCV may find other near-duplicates"
        )
    content = {"path": str(root), "train": "images/train", "val": "images/val", "names": list(public.names)}
    write_whole(path, f"# {public.source}, {public.license}\n{yaml.safe_dump(content, sort_keys=False)}")
    return path


def stem_of(image: str) -> str:
    """Returns the name of the image from which Roboflow made this one: ``a_jpg`` of ``a_jpg.rf.HASH.jpg``."""
    return re.sub(r"\.rf\.\w+$", "", PurePosixPath(image).stem)


def yolo_rows(text: str, public: PublicSet) -> list[str]:
    """Returns the rows of a label file as boxes inside the image, each once; polygons become the boxes around them."""
    rows = []
    for label, x, y in _outlines(text, public):
        x1, x2, y1, y2 = (float(v) for v in np.clip([min(x), max(x), min(y), max(y)], 0, 1))
        if x2 > x1 and y2 > y1:
            rows.append(f"{label} {(x1 + x2) / 2:.6f} {(y1 + y2) / 2:.6f} {x2 - x1:.6f} {y2 - y1:.6f}\n")
    return list(dict.fromkeys(rows))


def _outlines(text: str, public: PublicSet) -> Iterator[tuple[int, list[float], list[float]]]:
    """Yields the class of each object, and the x and y of its corners, as fractions of the image's sides."""
    if public.labels == "voc":
        root = ElementTree.fromstring(text)
        width, height = (float(root.findtext(f"size/{side}", "0")) for side in ("width", "height"))
        for item in root.iter("object"):
            x1, y1, x2, y2 = (float(item.findtext(f"bndbox/{v}", "0")) for v in ("xmin", "ymin", "xmax", "ymax"))
            yield public.names.index(item.findtext("name", "")), [x1 / width, x2 / width], [y1 / height, y2 / height]
        return
    for label, *numbers in map(str.split, text.splitlines()):
        values = list(map(float, numbers))
        if len(values) == 4:
            x, y, width, height = values
            yield int(label), [x - width / 2, x + width / 2], [y - height / 2, y + height / 2]
        else:
            yield int(label), values[0::2], values[1::2]


def digest(root: Path) -> str:
    """Returns the SHA-256 of the names and contents of a data set's images and labels."""
    total = hashlib.sha256()
    for path in sorted(root.glob("*/*/*")):
        total.update(f"{path.relative_to(root).as_posix()}\n".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def _samples(blobs: dict[str, str], folder: str, labels: str) -> Iterator[tuple[str, str]]:
    """Yields the images of a folder that have a label file, each with it, by the hashes of the images' contents."""
    place, ending = LABELS[labels]
    for image in sorted(blobs, key=lambda path: (blobs[path], path)):
        if image.startswith(f"{folder}/"):
            parent, name = image.rsplit("images/", 1)
            label = f"{parent}{place}/{PurePosixPath(name).with_suffix('')}{ending}"
            if label in blobs:
                yield image, label


def _one_per_source(blobs: dict[str, str], folder: str, labels: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields the first image and label file of each source (`stem_of`) and content."""
    seen = set()
    for image, label in _samples(blobs, folder, labels):
        stem = stem_of(image)
        if not seen & {stem, blobs[image]}:
            seen |= {stem, blobs[image]}
            yield stem, (image, label)


def _list_files(clone: Path, commit: str) -> Iterator[tuple[str, str]]:
    """Yields the path and the hash of each file of a commit."""
    for line in _git(clone, "ls-tree", "-r", "-z", commit).decode().split("\0")[:-1]:
        head, path = line.split("\t", 1)
        yield path, head.split()[2]


def _git(clone: Path, *words: str) -> bytes:
    """Runs git in ``clone`` and returns its output. Raises UserError if it fails."""
    done = subprocess.run(["git", "-C", clone, *words], capture_output=True, check=False)
    if done.returncode:
        raise UserError(f"git {' '.join(words)} in {clone}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def main() -> None:
    options = parse_flags(
        "accuracy.public",
        __doc__,
        {"folder": {"type": Path, "help": "folder of the data sets"}},
        only={"nargs": "*", "default": [], "help": "names of data sets in public.yaml; default: all"},
        clones={"type": Path, "help": "folder of the repositories; default: FOLDER/clones"},
    )
    sets = read_table()
    unknown = set(options.only) - set(sets)
    if unknown:
        raise UserError(f"--only: no data set {', '.join(sorted(unknown))}, only {', '.join(sets)}")
    folder = options.folder.resolve()
    for name in options.only or sets:
        clone = (options.clones or folder / "clones").resolve() / name
        fetch_commit(sets[name], clone)
        print(make_set(name, sets[name], clone, folder), flush=True)


if __name__ == "__main__":
    run_benchmark(main)
