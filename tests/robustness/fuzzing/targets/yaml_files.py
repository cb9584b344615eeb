"""Changed YAMLs of data sets, recipes and models: read as a plain reader reads them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml

from data.dataset.yaml_file import load_dataset_spec
from data.listing.listing import list_split
from models.detector import build_on_meta
from models.spec import load_spec
from tests.helpers.repository import ROOT
from tests.robustness.fuzzing.labels import NAMES, SIZES
from tests.robustness.fuzzing.targets.case import Case
from utils.config.recipes import read_recipe
from utils.config.settings import Hyperparameters

NULLS = ("~", "null", "Null", "NULL")  # how YAML writes no value, besides nothing


def read_plainly(path: Path, *, as_written: bool = False) -> Any:
    """Returns the content of a YAML file. PyYAML's Python parser reads it, unlike the program's libyaml, unless there
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


def _has_explicit_null(path: Path, key: str) -> bool:
    """Returns whether the value of ``key`` is declared as null: "!!null x"."""
    root = yaml.compose(path.read_text(encoding="utf-8-sig"), Loader=yaml.CSafeLoader)
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    return any(name.value == key and value.tag == "tag:yaml.org,2002:null" for name, value in pairs)


def data_yaml(case: Case) -> str:
    """A changed YAML of a data set: refused, or read as a plain reader reads it."""
    root = case.world.labeled
    path = case.folder / "changed.yaml"
    text = (root / f"{case.rng.choice(('yolo', 'voc', 'coco'))}.yaml").read_text()
    path.write_text(text.replace("path: .", f"path: {root}") + "download: x\n")
    case.change(path)
    case.files += [root, *(p.name for p in root.rglob("*"))]
    case.files.append("/proc")  # it has unreadable folders, which are named if a path becomes /
    spec = load_dataset_spec(path)
    listing = list_split(spec, "train")
    names = read_plainly(path, as_written=True).get("names")
    if _has_explicit_null(path, "names"):
        names = None
    if isinstance(names, dict):
        by_number = {int(number): name for number, name in names.items()}
        names = [by_number[i] for i in range(len(by_number))]
    if names and names not in NULLS:  # else the classes are those of the labels
        assert spec.names == tuple(name.strip() for name in names), spec.names
    assert [name.rsplit("/", 1)[-1] for name in listing.images] == sorted(SIZES)
    return "taken as it says"


def recipe(case: Case) -> str:
    path = case.folder / "changed.yaml"
    shutil.copy(ROOT / "configs" / "hyp" / "scratch.yaml", path)
    case.change(path)
    result = read_recipe(str(path), pretrained=False)
    assert isinstance(result, Hyperparameters)
    for key, value in (read_plainly(path) or {}).items():
        held = getattr(result, key)
        assert held == value or held == float(value), f"{key}: {value!r} becomes {held!r}"
    return "taken as it says"


def model(case: Case) -> str:
    path = case.folder / "changed.yaml"
    others = (ROOT / "configs" / "models").glob("yolo*8.yaml")
    shutil.copy(case.rng.choice([case.world.labeled / "tiny.yaml", *sorted(others)]), path)
    case.change(path)
    build_on_meta(load_spec(path), 2, NAMES)
    read_plainly(path)
    return "built"
