"""Which files the names in settings mean, from any working folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.run.resolve_paths import resolve_path


@pytest.mark.parametrize(
    ("name", "value", "resolved"),
    [
        ("data", "demo", "demo"),  # also beside a folder of this name
        ("data", "typo", "{here}/typo"),
        ("data", "gone.yaml", "{here}/gone.yaml"),
        ("data", "set", "{here}/set/data.yaml"),
        ("data", "several", "{here}/several"),  # opening it says that one of the two must be named
        ("data", "named", "{here}/named"),  # its YAML only names the classes
        ("data", "https://host/set.yaml", "https://host/set.yaml"),  # refused by its name when it is opened
        ("weights", "ckpt/best", "{here}/ckpt/best"),
        ("weights", "best", "{here}/best"),
        ("weights", "~/best.pt", "{here}/home/best.pt"),
        ("model", "~/mine.yaml", "{here}/home/mine.yaml"),
        ("weights", "yolov8n", "yolov8n"),
        ("weights", "yolov8n.pt", "yolov8n.pt"),
        ("weights", "gone.pt", "{here}/gone.pt"),  # no name of public weights
        ("weights", "https://host/best.pt", "https://host/best.pt"),
        ("model", "best", "best"),  # no YAML
        ("model", "yolov8n.yaml", "yolov8n.yaml"),
        ("model", "yolox-s.yaml", "yolox-s.yaml"),
        ("model", "gone.yaml", "{here}/gone.yaml"),
        ("model", "../gone.yaml", "{above}/gone.yaml"),
        ("groups", r"(\d+)/", r"(\d+)/"),
        ("groups", "best", "{here}/best"),
        ("teacher", "", ""),
    ],
)
def test_a_setting_names_a_file_by_its_absolute_path(tmp_path: Path, monkeypatch, name, value, resolved):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder in ("demo", "set", "named", "several"):
        (tmp_path / folder).mkdir()
    (tmp_path / "set/data.yaml").write_text("train: images\n")
    (tmp_path / "named/data.yaml").write_text("names: [a]\n")
    for name_of_yaml in ("a", "b"):
        (tmp_path / f"several/{name_of_yaml}.yaml").write_text("train: images\n")
    (tmp_path / "best").touch()
    expected = resolved.replace("{here}", str(tmp_path)).replace("{above}", str(tmp_path.parent))
    assert resolve_path(name, value) == expected
    monkeypatch.chdir(tmp_path.parent)
    assert resolve_path(name, expected) == expected
