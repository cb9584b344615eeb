"""Writes the YAML of a data set."""

from pathlib import Path


def write_yaml(folder: Path, text: str, name: str = "d.yaml") -> Path:
    """Writes ``text``, and returns the path of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path
