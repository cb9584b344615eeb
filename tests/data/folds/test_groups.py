"""Groups of images, from names, files and near-duplicates."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from data.folds.groups import groups_of
from tests.data.folds.eighteen_images import index_of, transfer


def test_groups_from_names_files_and_near_duplicates(config, tmp_path):
    index = index_of(config)
    assert len(set(groups_of(index, "", False))) == 18
    assert len(set(groups_of(index, r"(\d)\.png", False))) == 10
    table = tmp_path / "groups.csv"
    table.write_text("image,group\n" + "".join(f"{path},{i % 4}\n" for i, path in enumerate(index.paths)))
    assert (groups_of(index, str(table), False) == np.arange(18) % 4).all()
    copy = index.path(3)
    twin = copy.replace("003", "020")
    transfer(shutil.copy, copy, twin)
    more = index_of(config)
    group = groups_of(more, "", True)
    paths = [more.path(i) for i in range(len(more))]
    assert group[paths.index(copy)] == group[paths.index(twin)]
    assert len(set(group)) == 18
    for name in (copy, index.path(7)):  # named as Roboflow names its copies of one image
        transfer(shutil.move, name, str(Path(name).with_name(f"a_jpg.rf.{Path(name).stem}.png")))
    more = index_of(config)
    assert len(set(groups_of(more, "", True))) == 17
    assert len(set(groups_of(more, "", False))) == 19
