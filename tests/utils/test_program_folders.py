from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.messages import refused
from utils.program_folders import cache_folder


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/lockstep")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as in a container whose user has no entry
    with refused("this user has no home folder for caches; set HOME or XDG_CACHE_HOME"):
        cache_folder()
