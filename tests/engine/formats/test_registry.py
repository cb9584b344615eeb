"""Exported models are recognized by their paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.formats.registry import format_of


@pytest.mark.parametrize(
    ("folder", "files", "expected"),
    [
        ("annotations", ("a.xml", "b.xml"), None),  # of Pascal VOC
        ("annotations", ("a.xml", "b.bin"), None),
        ("renamed", ("a.xml", "a.bin"), "openvino"),
        ("a_openvino_model", (), "openvino"),
        ("renamed", ("model.ncnn.param", "model.ncnn.bin"), "ncnn"),
        ("renamed", ("model.ncnn.param",), None),
        ("a.tflite", (), None),
    ],
)
def test_the_format_of_a_folder(tmp_path: Path, folder: str, files: tuple[str, ...], expected: str | None):
    path = tmp_path / folder
    path.mkdir()
    for name in files:
        (path / name).touch()
    assert format_of(path) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.TFLITE", "litert"),
        ("a.xml", "openvino"),
        ("model.ncnn.param", "ncnn"),
        ("a.pt", None),
        ("a.tflite.pt", None),
    ],
)
def test_the_format_of_a_file(name: str, expected: str | None):
    assert format_of(Path("somewhere") / name) == expected
