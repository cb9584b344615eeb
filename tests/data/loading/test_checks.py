"""Facts that processes compare: copies of a data set that lead to different epochs have different ones."""

from __future__ import annotations

import shutil

from data.dataset.yaml_file import load_dataset_spec
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.loading.checks import data_facts
from data.samples.sample_weights import tile_weights
from data.samples.tiled_index import TiledIndex
from tests.helpers.tiny import write_tiled_dataset
from utils.config.settings import Hyperparameters


def test_an_unusable_row_in_one_copy_of_tiled_images_is_a_difference(tmp_path):
    """The row leaves the other labels as they are, but the background tiles of its image no longer occur."""
    original = write_tiled_dataset(tmp_path / "a", [(120, 120)] * 3, tile=40, squares=2, seed=0)
    copies = {name: tmp_path / name / original.name for name in "abc"}
    for name in "bc":
        shutil.copytree(tmp_path / "a", tmp_path / name)
    with open(tmp_path / "c/labels/train/0.txt", "a") as file:
        file.write("0 0.5 0.5\n")
    facts = {}
    epoch_sizes = {}
    for name, path in copies.items():
        settings = IndexSettings(cache_dir=str(tmp_path / f"cache-{name}"), progress=False, max_bad=0.5)
        index = load_index(load_dataset_spec(path), "train", settings)
        facts[name] = data_facts("train", index)
        tiles = TiledIndex(index, index.tile, hyp=Hyperparameters(), seed=0)
        epoch_sizes[name] = tile_weights(tiles, 100.0).sum()
    assert epoch_sizes["a"] == epoch_sizes["b"] > epoch_sizes["c"]
    assert facts["a"] == facts["b"]
    assert {fact for fact in facts["a"] if facts["a"][fact] != facts["c"][fact]} == {"the train labels"}
