"""One listing a node: the first process of a node lists and scans a split, the others map its index."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from data.loading.build import open_val_index
from data.open import open_data
from data.spec import DataSource
from tests.data.data_set import DataSet, voc
from tests.helpers.ranks import run_ranks
from utils.config.settings import TrainConfig

ROWS = "0 0.5 0.5 0.2 0.2\n1 0.3 0.3 0.1 0.1\n"


@contextlib.contextmanager
def _recorded(root: str) -> Iterator[list[str]]:
    """Records the folders and files below ``root`` that this process lists and opens."""
    used: list[str] = []
    plain_scandir, plain_open = os.scandir, os.open

    def seen(path) -> None:
        if isinstance(path, (str, os.PathLike)) and str(path).startswith(f"{root}/"):
            used.append(os.path.relpath(path, root))

    def scandir(path="."):
        seen(path)
        return plain_scandir(path)

    def open_(path, *args, **kwargs):
        seen(path)
        return plain_open(path, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        patch.setattr(os, "open", open_)
        yield used


def _open(ctx, data: str, cache: str):
    """Returns what of the data set this process lists and opens for its index, and the index."""
    spec = open_data(DataSource(data, ("train", "val"), cache_dir=cache), ctx)
    with _recorded(os.path.dirname(data)) as used:
        index = open_val_index(ctx, TrainConfig(data=data, cache_dir=cache, workers=0), spec, "train")
    return used, list(index.paths), index.classes.tolist(), index.label_digest()


def test_other_processes_of_the_node_do_not_list_or_scan(tmp_path):
    data = DataSet(tmp_path / "set")
    data.pairs(*(f"train/{i}" for i in range(4)), "val/0", rows=ROWS)
    data.file("train.txt", "".join(f"images/train/{i}.png\n" for i in range(4)))
    data.yaml(train="train.txt", val="images/val")
    leader, *others = run_ranks(3, _open, str(data.data), str(tmp_path / "cache"))
    assert "train.txt" in leader[0]
    for used, *content in others:
        assert used == []
        assert content == list(leader[1:])


def _open_described(ctx, data: str):
    with _recorded(data) as used:
        return used, open_data(DataSource(data, ("train",)), ctx).names


def test_the_classes_are_read_by_one_process(tmp_path):
    data = DataSet(tmp_path / "set")
    data.write("train/x.png train/y.png train/x.xml")
    data.file("train/y.xml", voc(("b", 5, 5, 20, 20)))
    (used, names), *others = run_ranks(3, _open_described, str(data.root))
    assert {"train/x.xml", "train/y.xml"} <= set(used)
    assert names == ("a", "b")
    assert others == [([], names)] * 2
