"""Names of the files of results: no file's results have the name of another file."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from engine.inference.results.result_names import UniqueStems

FILES = ["x/a:b.jpg", "x/a_b.jpg", "x/c.jpg", "y/c.jpg", "x/c-2.jpg", "x/D.jpg", "x/d.png", "x/ .jpg", "x/_.jpg"]


@pytest.mark.parametrize("order", [FILES, FILES[::-1], sorted(FILES)])
def test_only_a_file_of_that_name_has_it(order):
    stem_of = UniqueStems(FILES)
    stems = {file: stem_of(file) for file in order}
    assert len({stem.casefold() for stem in stems.values()}) == len(FILES)
    own = {Path(file).stem for file in FILES}
    for file, stem in stems.items():
        assert stem == Path(file).stem or stem not in own, file
    for alone in ("x/a_b.jpg", "x/c-2.jpg", "x/_.jpg"):
        assert stems[alone] == Path(alone).stem
    assert stem_of.renamed() == {file: stem for file, stem in stems.items() if stem != Path(file).stem}


def test_each_file_of_one_name_gets_it_once():
    for order in itertools.permutations(["x/c.jpg", "y/c.jpg", "z/c.jpg"]):
        stem_of = UniqueStems(order)
        assert [stem_of(file) for file in order] == ["c", "c-2", "c-3"]
        assert [*stem_of.renamed().items()] == [(order[1], "c-2"), (order[2], "c-3")]


def test_streams_are_named_without_being_renamed():
    stem_of = UniqueStems([])
    assert stem_of("0") == "webcam0"
    assert stem_of("rtsp://cam:8554/live", is_video=True) == "cam_8554_live"
    assert stem_of.renamed() == {}
