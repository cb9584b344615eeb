"""A data set and flags for searches."""

from __future__ import annotations

import pytest

from tests.helpers.searches import RANGES, SMALL
from tests.helpers.tiny import write_dataset, write_model


@pytest.fixture(scope="module")
def root_and_flags(tmp_path_factory):
    root = tmp_path_factory.mktemp("search")
    data = write_dataset(root / "set", train=8, val=4)
    model = write_model(root / "tiny.yaml")
    (root / "ranges.yaml").write_text(RANGES)
    flags = ["--hyp", root / "ranges.yaml", "--data", data, "--model", model, *SMALL, "--fitness", "recall"]
    return root, [str(flag) for flag in (*flags, "--project", root, "--cache-dir", root)]
