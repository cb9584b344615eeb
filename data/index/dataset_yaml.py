"""Reads data set YAMLs in the format of YOLOv5 and Ultralytics. Nothing is downloaded or run.

Keys: ``path`` (the data set's folder, relative to the YAML's folder or else to the current one; default: the YAML's
folder), ``train`` / ``val`` / ``test`` (a folder, a list of folders, or a .txt list of images; also a list of other
data sets' YAMLs, whose splits of this name are joined), ``names`` (list or
map), ``nc`` (checked against the names), and extensions: ``annotations``, COCO JSON files or Pascal VOC folders, by
split; ``classes``, a map that renames and merges classes, or makes their boxes regions to ignore; ``ignore``, a list of
the latter; ``channels`` and ``bits`` of the images, see `utils.config.pixels.PixelFormat`; ``tile``, the side of the
tiles that large images are cut into.
"""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from data.index.folder import FolderContent, read_folder
from data.labels.coco import COCO
from data.labels.label_format import LabelFormat
from data.labels.voc import VOC
from data.labels.yolo import YOLO
from utils.config.pixels import RGB8, PixelFormat
from utils.config.settings import MOST_IMGSZ, class_numbers, typed_classes
from utils.config.yaml_files import load_yaml, suggestion
from utils.errors import UserError, one_line
from utils.files.folders import CONFIGS
from utils.store.client import is_url, mirrored, refresh, store_of
from utils.store.shards import SUFFIX

YAML_FOLDER = CONFIGS / "data"  # of public data sets
SPLITS = ("train", "val", "test")
FORMATS: tuple[LabelFormat, ...] = (YOLO, COCO, VOC)  # a split is read by the first that detects its labels
_USED_KEYS = (
    "path",
    *SPLITS,
    "names",
    "nc",
    "classes",
    "ignore",
    "annotations",
    "download",
    "channels",
    "bits",
    "tile",
)
# Keys of public YAMLs that do not affect training.
_DESCRIPTIVE_KEYS = (
    "roboflow",
    "license",
    "licence",
    "author",
    "url",
    "description",
    "version",
    "date",
    "validation",
    "minival",
)
IGNORE = "ignore"  # in ``classes``: the boxes are regions to ignore
IGNORED = -1  # the number of such a class
LEAST_TILE = 32  # pixels
WITHOUT_VAL = "train with --val-fraction 0.2 or python -m tools.kfold"
MOST_COMPARED = 1000  # names of files with a missing one
_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar")
_OTHER_TASKS = {"kpt_shape": "keypoints", "flip_idx": "keypoints", "kpt_names": "keypoints"}


@dataclass(frozen=True, slots=True)
class SplitSource:
    """Absolute paths of the images and labels of a split. They are checked when the split is listed."""

    images: tuple[Path, ...]  # folders and .txt lists
    annotations: Path | None  # None: YOLO txt beside the images
    label_format: LabelFormat | None  # None: unknown, or the annotations are missing
    parts: tuple[DatasetSpec, ...] = ()  # data sets whose splits of this name are joined, instead of the above


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """The content of a data set YAML."""

    names: tuple[str, ...]  # of the classes that a model learns
    root: Path  # absolute
    splits: dict[str, SplitSource]
    source: str  # path of the YAML, for messages
    if_missing: str = "correct its paths"  # what to do if the data is missing
    held_out: frozenset[str] = frozenset()  # names of the training images that are the split "val"
    label_names: tuple[str, ...] = ()  # of the classes in the labels, by number; empty: `names`
    class_of: tuple[int, ...] = ()  # by number in the labels: the number in `names`, or `IGNORED`
    summary: str = ""  # of a folder: what has been found there
    classes: tuple[int, ...] = ()  # numbers in ``names`` of those that are used, ascending; empty: all
    pixels: PixelFormat = RGB8  # of the images
    tile: int = 0  # side of the tiles that images are cut into, pixels; 0: they are not

    def split(self, name: str) -> SplitSource:
        """The split ``name``. Raises UserError if the YAML does not have it."""
        if name not in self.splits:
            hint = f", or {WITHOUT_VAL}" if name == "val" else ""
            raise UserError(
                f"{self.source}: has no '{name}' split, only {', '.join(self.splits)}; add '{name}: <folder>'{hint}"
            )
        return self.splits[name]

    def check_split(self, name: str) -> None:
        """Raises UserError unless the YAML has the split ``name``, and its folders, lists and annotations exist."""
        source = self.split(name)
        for part in source.parts:
            part.check_split(name)
        for path in (*source.images, *([source.annotations] if source.annotations else ())):
            if not path.exists():
                raise self.missing_error(path)

    def hold_out(self, names: Iterable[str]) -> DatasetSpec:
        """The data set with the training images ``names``, relative to its folder, as the split "val"."""
        return replace(self, splits=self.splits | {"val": self.split("train")}, held_out=frozenset(names))

    def use_classes(self, classes: Sequence[int | str]) -> DatasetSpec:
        """The data set with all images, but the boxes of ``classes`` only, given by number or name; empty: all. Raises
        UserError for a class that it does not have."""
        numbers = sorted(set(class_numbers(classes, dict(enumerate(self.names)), self.source)))
        return replace(self, classes=tuple(numbers) if len(numbers) < len(self.names) else ())

    def extended(self, names: Sequence[str], owner: str) -> DatasetSpec:
        """The data set for a model with the classes ``names`` of ``owner`` and, after them, those of the data set that
        are not among them, ignoring case and outer spaces. A class that it does not label is ignored in its images, as
        where data sets are joined. Raises UserError if two of its classes have one of the names."""
        given = {name.strip().lower(): name for name in reversed(names)}
        renamed = [given.get(name.strip().lower(), name) for name in self.names]
        used = [renamed[number] for number in self.classes or range(len(renamed))]
        if twice := next((name for name, count in Counter(used).items() if count > 1), None):
            raise UserError(f"{self.source}: two of its classes are '{twice}' of {owner}; merge them with 'classes:'")
        number = tuple(range(len(renamed)))
        part = replace(
            self,
            names=tuple(renamed),
            label_names=self.label_names or self.names,
            class_of=self.class_of or number,
        )
        splits = {name: SplitSource((), None, None, (part,)) for name in self.splits}
        whole = {"held_out": frozenset(), "label_names": (), "class_of": (), "classes": ()}
        return replace(self, names=tuple(dict.fromkeys((*names, *used))), splits=splits, **whole)

    def as_labeled(self) -> DatasetSpec:
        """The data set with the classes of its labels, none merged or left out."""
        return replace(self, names=self.label_names or self.names, label_names=(), class_of=(), classes=())

    def content(self) -> dict[str, Any]:
        """What a YAML says of the classes, with all of them, of the pixels, and of tiles."""
        others = self.pixels.content() | ({"tile": self.tile} if self.tile else {})
        if not self.label_names:
            return {"names": list(self.names)} | others
        to = {IGNORED: IGNORE} | dict(enumerate(self.names))
        classes = {n: to[c] for n, c in zip(self.label_names, self.class_of)}
        return {"names": list(self.label_names), "classes": classes} | others

    def missing_error(self, path: Path) -> UserError:
        """The error for a missing part of the data set."""
        return UserError(f"{path}: not found (named by {self.source}){what_exists(path)}; {self.if_missing}")


def what_exists(path: Path) -> str:
    """What is there instead of a missing ``path``, for messages: a name like that of the first missing part of the
    path, or what is in the folder; "" if nothing is worth mentioning."""
    parent = next(folder for folder in path.parents if folder.is_dir())
    missing = path.relative_to(parent).parts[0]
    is_last = parent == path.parent
    suffix = path.suffix if is_last else ""
    if "*" in missing:
        return f"; patterns are not expanded: name the folder, {parent}"
    try:
        with os.scandir(parent) as entries:
            found = [e for e in entries if not e.name.startswith(".")]
        names = sorted(e.name for e in found if (e.name.endswith(suffix) if suffix else e.is_dir()))
    except OSError:
        return ""
    known = {name.removesuffix(suffix).lower(): name for name in reversed(names[:MOST_COMPARED])}
    close = difflib.get_close_matches(missing.removesuffix(suffix).lower(), known, n=1, cutoff=0.54)
    if close:  # as "validate" is to "val"
        return f"; '{parent / known[close[0]]}' exists"
    return f"; {parent} has {', '.join(names[:5])}{', ...' * (len(names) > 5)}" if is_last and names else ""


def check_dataset(data: str, splits: Sequence[str], classes: Sequence[str] = ()) -> None:
    """Raises UserError for what can be seen at once to be wrong with ``data``, as ``--data`` names it, or with
    ``--classes``. Names that stand in annotations alone are left for later: to read them may take long."""
    if data == "demo" or is_url(data):  # nor is a store asked
        return
    data = known_by_name(data)
    check_exists(data)
    values = None if Path(data).is_dir() else load_yaml(data)
    if isinstance(values, dict) and any("://" in str(values.get(split)) for split in SPLITS):
        return
    if not isinstance(values, dict) or values.get("names") is not None or "annotations" not in values:
        spec = load_dataset_spec(data).use_classes(typed_classes(classes))
        for split in splits:
            spec.check_split(split)


def known_by_name(data: str) -> str:
    """Replaces a bare name that is not a file by the YAML of that name in configs/data."""
    is_bare = Path(data).name == data != "" and Path(data).suffix in ("", ".yaml", ".yml")
    listed = YAML_FOLDER / f"{Path(data).stem}.yaml"
    return str(listed) if is_bare and not Path(data).exists() and listed.is_file() else data


def check_exists(data: str) -> None:
    """Raises UserError with the known names."""
    path = Path(data)
    if data and path.exists():
        if path.suffix.lower() in _ARCHIVES and path.is_file():
            raise UserError(f"--data {data}: an archive; unpack it and name the folder, or the YAML in it")
        return
    known = ["demo", *sorted(p.stem for p in YAML_FOLDER.glob("*.yaml") if p.stem != "template")]
    if path.stem in known:
        hint = f" (did you mean '{path.stem}' of configs/data?)"
    else:
        files = _yaml_files_nearby(path)
        nearby = {file.parent.name if file.stem == "data" else file.stem: str(file) for file in files}
        close = difflib.get_close_matches(path.stem, [*known, *nearby], n=1)
        hint = f" (did you mean '{nearby.get(close[0], close[0])}'?)" if close else what_exists(path) if data else ""
    named = data or "''"
    raise UserError(f"--data {named}: no such file{hint}; known by name: {', '.join(known)}")


def _yaml_files_nearby(path: Path) -> Iterator[Path]:
    """YAML files where a data set's may be: in folders of data sets, in the working folder, and beside ``path``."""
    for folder in ("../datasets", "datasets"):
        yield from Path(folder).glob("*/*.y*ml")
    for folder in (Path("."), path.parent):
        yield from folder.glob("*.y*ml")


class Stores(NamedTuple):
    """How what is in object stores is read."""

    cache_dir: str = ""  # folder of copies; empty: ~/.cache/lockstep
    only: str | None = None  # the store of a YAML that is in one, which names no other; "": none; None: any
    why: str = "an address is read only if you name it: with --data, or in a YAML that --data names"

    def mirrored(self, url: str, where: str) -> Path:
        """`mirrored`. Raises UserError for an address that is not the user's."""
        if self.only is not None and store_of(url) != self.only:
            raise UserError(f"{where}: names {url}; {self.why}")
        return mirrored(url, self.cache_dir)


def load_dataset_spec(
    path: str | Path, known_root: str = "", cache_dir: str = "", *, stores: Stores | None = None
) -> DatasetSpec:
    """Reads and checks a data set YAML, or a folder (`read_folder`), also of an object store. Raises UserError with the
    file and the key.

    Args:
        known_root: folder of the data set in an earlier run; used if a relative ``path`` is not found.
        cache_dir: of `Stores`.
        stores: those that may be read; None: those that the user names.
    """
    stores = stores or Stores(cache_dir)
    if is_url(str(path)):
        url = str(path) if str(path).endswith((".yaml", ".yml")) else f"{str(path).rstrip('/')}/data.yaml"
        copy = stores.mirrored(url, str(path))
        return replace(load_dataset_spec(copy, stores=stores._replace(only=store_of(url))), source=str(path))
    path = Path(path)
    content = read_folder(normal_path(path)) if path.is_dir() else FolderContent({}, path, "")
    if content.yaml is not None:
        path = content.yaml
    values = load_yaml(path) if content.yaml is not None else content.values | {"path": str(path.absolute())}
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected keys (path, train, val, names), got {type(values).__name__}")
    _check_keys(values, path)
    if "val" not in values and "validation" in values:
        values["val"] = values["validation"]
    pixels = PixelFormat.checked(values.get("channels", 3), values.get("bits", 8), str(path))
    root = _resolve_root(values.get("path"), path, known_root)
    annotations = _read_annotations(values.get("annotations"), root, path)
    splits = {
        split: _read_split(values[split], annotations.get(split), root, split, f"{path}: {split}", stores)
        for split in SPLITS
        if values.get(split) not in (None, "", [])
    }
    if not splits:
        raise UserError(f"{path}: names no images; add 'train: <folder>' and 'val: <folder>'")
    for split in annotations:
        if split not in splits and isinstance(values["annotations"], dict):
            raise UserError(f"{path}: annotations for '{split}', but no '{split}: <folder of its images>'")
    for part in (part for source in splits.values() for part in source.parts):
        if part.pixels != pixels:
            raise UserError(f"{path}: has images of {pixels}, {part.source} of {part.pixels}; write the same in both")
    label_names = _read_names(values, splits, path)
    if_missing, tile = _if_missing(values, path), _read_tile(values.get("tile"), splits, path)
    spec = DatasetSpec(
        label_names, root, splits, str(path), if_missing, summary=content.summary, pixels=pixels, tile=tile
    )
    if not values.get("classes") and not values.get("ignore"):
        return spec
    targets = _read_class_map(values, label_names, path)
    names = tuple(dict.fromkeys(name for name in targets if name is not None))
    if not names:
        raise UserError(f"{path}: classes: all classes are ignored; there is nothing to learn")
    number = {None: IGNORED} | {name: i for i, name in enumerate(names)}
    class_of = tuple(number[name] for name in targets)
    return replace(spec, names=names, label_names=label_names, class_of=class_of)


def _if_missing(values: dict, path: Path) -> str:
    if path.absolute().parent == YAML_FOLDER and "url" in values:
        unpacked = "unpack it as the first lines of that file describe"
        return f"download {values['url']} (license: {values['license']}) and {unpacked}"
    if values.get("download"):
        return "its 'download' is never run: download and unpack the data yourself"
    return "correct its paths"


def _check_keys(values: dict, path: Path) -> None:
    known = (*_USED_KEYS, *_DESCRIPTIVE_KEYS)
    for key in values:
        if key in _OTHER_TASKS:
            raise UserError(
                f"{path}: '{key}' declares a data set of {_OTHER_TASKS[key]}; only bounding boxes are supported"
            )
        if key not in known:
            raise UserError(f"{path}: unknown key '{key}'{suggestion(str(key), known)}")


def _text_path(value: Any, where: str) -> Path:
    if not isinstance(value, str):
        raise UserError(f"{where}: expected a path, got {value!r}")
    path = Path(os.path.expanduser(value.strip()))
    if len(str(path)) > 4000 or any(len(part.encode("utf-8", "surrogatepass")) > 255 for part in path.parts):
        raise UserError(f"{where}: a path or a name in it is longer than file systems allow: {str(path)[:100]}...")
    return path


def _resolve_root(value: Any, yaml_path: Path, known_root: str) -> Path:
    home = yaml_path.absolute().parent
    if value in (None, ""):
        return normal_path(home)
    given = _text_path(value, f"{yaml_path}: path")
    candidates = [given] if given.is_absolute() else [home / given, Path.cwd() / given]
    if known_root and not given.is_absolute():
        candidates.append(Path(known_root))
    missing = candidates[1] if home == YAML_FOLDER and not given.is_absolute() else candidates[0]
    return normal_path(next((c for c in candidates if c.is_dir()), missing))


def normal_path(path: Path) -> Path:
    """Absolute, without ``..``. Symbolic links are kept where possible."""
    return path.resolve() if ".." in path.parts else path.absolute()


def _read_split(
    value: Any, annotations: Path | None, root: Path, split: str, where: str, stores: Stores
) -> SplitSource:
    entries = value if isinstance(value, list) else [value]
    if _joins(value):
        parts = tuple(_read_part(entry, root, split, where, stores) for entry in entries)
        sources = [os.path.realpath(part.source) for part in parts]
        if twice := next((part.source for i, part in enumerate(parts) if sources[i] in sources[:i]), None):
            raise UserError(f"{where}: joins {twice} twice; name it once")
        if annotations is not None:
            raise UserError(f"{where}: joins other data sets; 'annotations' belong in their YAMLs")
        return SplitSource((), None, None, parts)
    images = tuple(_read_entry(entry, root, split, where, stores) for entry in entries)
    return SplitSource(images, annotations, next((f for f in FORMATS if f.detect(annotations)), None))


def _read_entry(entry: Any, root: Path, split: str, where: str, stores: Stores) -> Path:
    """The folder, list or index of shards that an entry names; of an object store, the local copy of the index."""
    if isinstance(entry, str) and is_url(entry):
        url = entry if entry.endswith(SUFFIX) else f"{entry.rstrip('/')}/{split}{SUFFIX}"
        return stores.mirrored(url, where)
    path = _resolve(_text_path(entry, where), root)
    return refresh(path) if path.suffix == SUFFIX else path


def _joins(value: Any) -> bool:
    """Whether a split's entry names YAMLs of other data sets."""
    return any(str(e).lower().endswith((".yaml", ".yml")) for e in (value if isinstance(value, list) else [value]))


def _read_part(entry: Any, root: Path, split: str, where: str, stores: Stores) -> DatasetSpec:
    is_remote = isinstance(entry, str) and is_url(entry)
    path = stores.mirrored(entry, where) if is_remote else _resolve(_text_path(entry, where), root)
    if path.suffix.lower() not in (".yaml", ".yml") or not path.is_file():
        raise UserError(f"{where}: {path}: not a YAML of a data set; name YAMLs only, or folders and lists only")
    content = load_yaml(path)
    if isinstance(content, dict) and _joins(content.get(split)):
        raise UserError(f"{where}: {path} names other YAMLs itself; name those here")
    part = load_dataset_spec(entry if is_remote else path, stores=stores)
    part.split(split)  # raises UserError
    return part


def _resolve(given: Path, root: Path) -> Path:
    """The path of an entry. Exports of Roboflow have ``../train/images`` instead of ``train/images``."""
    if given.parts[:1] == ("..",):
        inside = Path(*given.parts[1:])
        if not os.path.exists(root / given) and os.path.exists(root / inside):
            given = inside
    return normal_path(root / given)


def _read_annotations(value: Any, root: Path, path: Path) -> dict[str, Path]:
    if value is None:
        return {}
    if isinstance(value, str):
        value = dict.fromkeys(SPLITS, value)
    if not isinstance(value, dict):
        raise UserError(f"{path}: annotations: expected a path or 'split: path' lines, got {value!r}")
    for split in value:
        if split not in SPLITS:
            raise UserError(f"{path}: annotations: unknown split '{split}'{suggestion(str(split), SPLITS)}")
    return {s: _resolve(_text_path(v, f"{path}: annotations: {s}"), root) for s, v in value.items() if v is not None}


def _read_names(values: dict, splits: dict[str, SplitSource], path: Path) -> tuple[str, ...]:
    given, count = values.get("names"), values.get("nc")
    of_parts = [part.names for source in splits.values() for part in source.parts]
    if given is None and of_parts:
        given = list(dict.fromkeys(name for names in of_parts for name in names))
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise UserError(f"{path}: nc: expected a positive number, got {count!r}")
    if given is not None:
        names = _checked_names(given, path)
    else:
        with_names = [s for s in splits.values() if s.label_format and s.label_format.class_names]
        if with_names:
            first = with_names[0].label_format
            names = first.class_names([s.annotations for s in with_names if s.label_format is first])
        elif count is not None:
            names = tuple(f"class_{i}" for i in range(count))
        else:
            raise UserError(f"{path}: has no 'names'; list the classes in the order of their ids")
    if unknown := {name for part in of_parts for name in part} - set(names):
        raise UserError(f"{path}: names: without '{min(unknown)}', a class of a data set that it joins; add it")
    if count is not None and count != len(names):
        raise UserError(f"{path}: nc is {count}, but there are {len(names)} names; make them agree")
    if broken := next((n for n in names if one_line(n) != n), None):
        raise UserError(
            f"{path}: names: {broken!r} contains a line break or another control character; class names are one line"
        )
    last = {name: i for i, name in enumerate(names)}
    if len(last) < len(names):
        first, twice = next((i, name) for i, name in enumerate(names) if last[name] != i)
        second = names.index(twice, first + 1)
        raise UserError(
            f"{path}: names: classes {first} and {second} are both called '{twice}'; class names must be unique"
        )
    return names


def _read_tile(value: Any, splits: dict[str, SplitSource], path: Path) -> int:
    if value is not None and (type(value) is not int or not LEAST_TILE <= value <= MOST_IMGSZ):
        raise UserError(f"{path}: tile: expected a side in pixels, {LEAST_TILE} to {MOST_IMGSZ}, got {value!r}")
    tile = value or 0
    for part in (part for source in splits.values() for part in source.parts):
        if part.tile not in (0, tile):
            raise UserError(f"{path}: joins {part.source}, which has 'tile: {part.tile}'; add 'tile: {part.tile}' here")
    return tile


def _read_class_map(values: dict, names: tuple[str, ...], path: Path) -> list[str | None]:
    """What each class of the labels is called for the model; None: ignored. Raises UserError."""
    given, ignored = values.get("classes") or {}, values.get("ignore") or []
    if not isinstance(given, dict):
        raise UserError(f"{path}: classes: expected 'class: new name' lines, got {given!r}")
    if not isinstance(ignored, list):
        raise UserError(f"{path}: ignore: expected a list of classes, got {ignored!r}")
    to = {str(name).strip(): new for name, new in given.items()}
    if both := [name for name in map(one_line, map(str, ignored)) if to.get(name.strip(), IGNORE) != IGNORE]:
        raise UserError(f"{path}: '{both[0]}' is in 'classes' and in 'ignore'; remove one of the two")
    to |= {str(name).strip(): IGNORE for name in ignored}
    known = set(names)
    for name, new in to.items():
        if name not in known:
            raise UserError(f"{path}: classes: '{one_line(name)}' is not one of the names{suggestion(name, names)}")
        is_text = isinstance(new, str | int | float) and not isinstance(new, bool) and str(new)
        if not is_text or one_line(str(new)).strip() != str(new):
            raise UserError(f"{path}: classes: {name}: expected the name of a class, got {new!r}")
    return [None if to.get(name) == IGNORE else str(to.get(name, name)) for name in names]


def _checked_names(given: Any, path: Path) -> tuple[str, ...]:
    if isinstance(given, dict):
        if not all(isinstance(k, int) and not isinstance(k, bool) for k in given):
            raise UserError(f"{path}: names: expected 'number: name' lines or a list")
        missing = sorted(set(range(len(given))) - set(given))
        if missing:
            raise UserError(
                f"{path}: names: {len(given)} names must be numbered 0 to {len(given) - 1}; {missing[0]} is missing"
            )
        given = [given[i] for i in range(len(given))]
    if not isinstance(given, list) or not given:
        raise UserError(f"{path}: names: expected a list or 'number: name' lines, got {given!r}")
    for name in given:
        if isinstance(name, bool) or not isinstance(name, str | int | float) or not str(name).strip():
            raise UserError(f"{path}: names: {name!r} is not text in YAML; put it in quotes")
    return tuple(str(name).strip() for name in given)
