"""Starting weights and licenses in model cards."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
import yaml

from engine.export import ancestry
from engine.export.ancestry import ancestry_of
from models.weights.download import CATALOG
from tests.helpers.exports import lively, write_weights
from tests.helpers.tiny import TINY_MODEL
from utils.config.yaml_files import load_yaml
from utils.files.checkpoint import read_checkpoint

FREE = "yours to choose (trained from random weights)"


@pytest.fixture
def public(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the catalog lists with its checksum as tiny, and another, plain, without one."""
    file = tmp_path / "tiny.pt"
    file.write_bytes(b"some weights")
    url = "https://example.com/a.pt"
    known = {"url": url, "license": "MIT", "sha256": hashlib.sha256(b"some weights").hexdigest()}
    catalog = tmp_path / "weights.yaml"
    catalog.write_text(yaml.safe_dump({"tiny": known, "plain": {"url": url, "license": "Apache-2.0"}}))
    monkeypatch.setattr(ancestry, "CATALOG", catalog)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return file


def trained(path: Path, start: Path | str) -> tuple[dict, Path]:
    """A checkpoint of a run that started from ``start``."""
    write_weights(path, lively(TINY_MODEL, ("a",)), config={"weights": str(start), "epochs": 3})
    return read_checkpoint(path), path


def test_public_files_are_known_by_checksum_or_name(public: Path, tmp_path: Path):
    foreign = {"format": "foreign"}
    renamed = shutil.copy(public, tmp_path / "mine.pt")
    for path in (public, renamed):
        assert ancestry_of(foreign, path) == ("tiny, a public file", "MIT")
    plain, other = tmp_path / "plain.pt", tmp_path / "other.pt"
    for path in (plain, other):
        path.write_bytes(b"others")
    assert ancestry_of(foreign, plain) == ("plain.pt", "Apache-2.0, if it was the public file of this name")
    assert ancestry_of(foreign, other) == ("other.pt, a file of unknown origin", "unknown")
    public.write_bytes(b"replaced")
    assert ancestry_of(foreign, public) == ("tiny.pt, a file of unknown origin", "unknown")


def test_fine_tuned_checkpoints_have_the_license_of_their_start(public: Path, tmp_path: Path):
    assert ancestry_of(*trained(tmp_path / "a.pt", public)) == ("tiny, a public file", "MIT")
    assert ancestry_of(*trained(tmp_path / "b.pt", tmp_path / "a.pt")) == (
        "a.pt, trained from tiny, a public file",
        "MIT",
    )
    public.unlink()
    by_name = "MIT, if it was the public file of this name"
    assert ancestry_of(*trained(tmp_path / "a.pt", public)) == ("tiny.pt", by_name)
    assert ancestry_of(*trained(tmp_path / "a.pt", "tiny")) == ("tiny", by_name)
    downloaded = tmp_path / "cache" / "lockstep" / "weights" / "tiny.pt"
    downloaded.parent.mkdir(parents=True)
    downloaded.write_bytes(b"some weights")
    for start in ("tiny", "tiny.pt"):
        assert ancestry_of(*trained(tmp_path / "a.pt", start)) == ("tiny, a public file", "MIT")
    downloaded.rename(downloaded.with_suffix(".pth"))
    assert ancestry_of(*trained(tmp_path / "a.pt", "tiny")) == ("tiny, a public file", "MIT")
    assert ancestry_of(*trained(tmp_path / "a.pt", "gone.pt")) == ("gone.pt, a file of unknown origin", "unknown")


def test_random_weights_and_circles(public: Path, tmp_path: Path):
    assert ancestry_of(*trained(tmp_path / "a.pt", "")) == ("random weights", FREE)
    assert ancestry_of(*trained(tmp_path / "b.pt", tmp_path / "a.pt")) == ("a.pt, trained from random weights", FREE)
    circle = trained(tmp_path / "c.pt", tmp_path / "c.pt")
    assert ancestry_of(*circle) == ("c.pt, trained from unknown", "unknown")


def test_every_public_file_has_a_license(tmp_path: Path):
    for name in load_yaml(CATALOG):
        assert ancestry_of({"format": "foreign"}, tmp_path / f"{name}.pt").license.split(",")[0] not in ("", "unknown")
