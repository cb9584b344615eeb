"""Shared fixtures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.source.labeled_folder import Folder
from tests.helpers.tiny import write_dataset


@pytest.fixture
def folder(tmp_path) -> Folder:
    """An empty data set, whose images and labels a test places."""
    return Folder(tmp_path / "set")


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    """The data set that `tests.data.source.exported_folders` exports: four training and three validation images."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_dataset(tmp_path / "set", train=4, val=3)
    for path in [*(tmp_path / "set").glob("*/val/*")]:  # some exports have all images in one folder
        path.rename(path.with_name(f"v{path.name}"))
    return tmp_path / "set"
