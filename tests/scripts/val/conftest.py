"""Fixtures of the tests of val.py."""

from __future__ import annotations

import pytest

from models.detector import build_detector
from tests.helpers.tiny import TINY_MODEL, write_detector
from tests.scripts.val.validation import NAMES, render_set


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A data set YAML and a checkpoint of a tiny untrained model."""
    folder = tmp_path_factory.mktemp("tiny")
    data = render_set(folder)
    model = build_detector(TINY_MODEL, len(NAMES), names=NAMES, seed=1)
    return data, write_detector(folder / "best.pt", model, data={"source": str(data)})
