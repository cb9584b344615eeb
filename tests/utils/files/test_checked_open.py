"""Files that are opened where something else may have taken the name."""

from __future__ import annotations

import os
import threading

import pytest

from tests.helpers.hostile_files import take_name
from utils.files.safe_io import open_direct

REASONS = {"pipe": "is a pipe or device", "link": "is a symbolic link", "folder": "is a folder"}


@pytest.mark.parametrize("mode", ["r", "a", "w", "r+"])
@pytest.mark.parametrize("kind", list(REASONS))
def test_what_is_not_our_file_is_refused_at_once(tmp_path, kind, mode):
    path = tmp_path / "cache"
    take_name(path, kind, 9)
    with pytest.raises(PermissionError, match=REASONS[kind]) as refused:
        open(path, mode, opener=open_direct)  # noqa: SIM115
    assert refused.value.filename == str(path)
    if kind == "link":
        assert (tmp_path / "target").stat().st_size == 9


def test_a_pipe_with_a_process_at_its_other_end_is_refused_too(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = threading.Thread(target=lambda: (tmp_path / "pipe").read_bytes())
    reader.start()
    while reader.is_alive():
        with pytest.raises(PermissionError, match="is a pipe or device"):
            open(tmp_path / "pipe", "ab", opener=open_direct)  # noqa: SIM115
