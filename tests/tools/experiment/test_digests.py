"""Digests of the files that a search or a cross-validation depends on."""

from __future__ import annotations

import hashlib

from tools.experiment.digests import digests_of_files
from utils.config.tool_settings import KfoldConfig


def test_settings_that_are_files_have_digests_and_other_texts_have_none(tmp_path):
    weights = tmp_path / "best.pt"
    weights.write_bytes(b"weights")
    patients = "|".join(f"patient{number:04}" for number in range(1000))  # longer than a path may be
    config = KfoldConfig(weights=str(weights), groups=f"({patients})")
    assert digests_of_files(config) == {"weights": hashlib.sha256(b"weights").hexdigest()}
