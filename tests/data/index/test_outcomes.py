"""Every labeled object and every image of a split is either used or lost, and counts once."""

from __future__ import annotations

import numpy as np
import pytest

from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.source.dataset_yaml import load_dataset_spec
from tests.helpers.messages import refused
from tests.helpers.three_formats import voc_text, write_image

GOOD = "0 0.5 0.5 0.2 0.2"
# Rows that are used, as they are or corrected; and rows that are lost.
USED = (GOOD, "1 0.3 0.3 0.1 0.1", "0 0.95 0.5 0.2 0.2", "0 0.5 0.5 -0.2 0.2", "1 0.1 0.1 0.2 0.1 0.3 0.4")
LOST = (
    "0 0.5 0.5 0 0.2",
    "7 0.5 0.5 0.2 0.2",
    "0 0.5 0.5",
    "0 3 3 0.2 0.2",
    "x 0.5 0.5 0.2 0.2",
    "0.5 1 1 1 1",
    "0 2 2 0 0",
)
FATAL = ("0 nan 0.5 0.2 0.2", "0 0.5 inf 0.2 0.2")  # nothing in a file with such a row is used


def write_split(root, rng) -> list[tuple[list[str], bool]]:
    """Writes images with random rows, some of them damaged, and returns rows, and whether the image can be read."""
    made = []
    for i in range(30):
        pools = [USED] * int(rng.integers(0, 4)) + [LOST] * int(rng.integers(0, 3)) + [FATAL] * int(rng.random() < 0.1)
        rows = [str(rng.choice(pool)) for pool in pools]
        image = root / f"images/{i:02}.png"
        write_image(image, 60, 80)
        is_readable = rng.random() > 0.1
        if not is_readable:
            image.write_bytes(b"no image")
        (root / "labels").mkdir(exist_ok=True)
        (root / f"labels/{i:02}.txt").write_text("\n".join(rows))
        made.append((rows, is_readable))
    return made


def is_used(rows: list[str], is_readable: bool) -> bool:
    """Returns whether an image is used: it is a background, or one of its objects is used."""
    has_object = any(row in USED for row in rows)
    return is_readable and not any(row in FATAL for row in rows) and (has_object or not rows)


@pytest.mark.parametrize("seed", range(6))
def test_what_was_labeled_is_used_or_lost_and_counts_once(tmp_path, seed):
    made = write_split(tmp_path, np.random.default_rng(seed))
    (tmp_path / "data.yaml").write_text("train: images\nnames: [a, b]\n")
    index = load_index(load_dataset_spec(tmp_path / "data.yaml"), "train", IndexSettings(progress=False, max_bad=1.0))
    ledger = index.report.ledger
    assert ledger.images == len(made)
    assert ledger.objects == sum(len(rows) for rows, _ in made)
    used = [is_used(*each) for each in made]
    assert list(index.paths) == [f"images/{i:02}.png" for i in np.flatnonzero(used)]
    assert ledger.used_images == len(index)
    kept = [[row for row in rows if row in USED] for (rows, _), use in zip(made, used) if use]
    assert np.diff(index.offsets).tolist() == [len(rows) for rows in kept]
    assert ledger.used_objects == sum(map(len, kept))
    lost = [any(row in LOST for row in rows) for (rows, _), use in zip(made, used) if use]
    assert index.incomplete.tolist() == lost


@pytest.mark.parametrize("separator", ["\n", ""])
def test_each_object_of_an_xml_in_one_line_counts(tmp_path, separator):
    """ElementTree writes such files unless told to indent."""
    boxes = [(c, 5 * c + 1, 1, 5 * c + 5, 9) for c in range(10)]
    write_image(tmp_path / "images/a.png", 60, 80)
    (tmp_path / "voc").mkdir()
    text = voc_text(boxes, ["a"] * 6 + ["b"] * 4, 60, 80)
    (tmp_path / "voc/a.xml").write_text(separator.join(text.splitlines()))
    (tmp_path / "data.yaml").write_text("train: images\nannotations: {train: voc}\nnames: [a]\n")
    spec = load_dataset_spec(tmp_path / "data.yaml")
    ledger = load_index(spec, "train", IndexSettings(progress=False, max_bad=0.4)).report.ledger
    assert (ledger.used_objects, ledger.lost_objects) == (6, 4)
    with refused("data.yaml: 'train': 4 of 10 labeled objects can't be used (--max-bad is 0.39): unknown class: ..."):
        load_index(spec, "train", IndexSettings(progress=False, max_bad=0.39))
