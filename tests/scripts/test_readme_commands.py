"""The documents' commands, on a clone and a user's own folder of images: check, train, score, detect, export, compare,
and run the exported file without us."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.documents import blocks, commands
from tests.helpers.preloaded import python
from tests.helpers.repository import ROOT
from tests.helpers.tiny import TINY_MODEL, write_dataset, write_model

DETECT = "\nprint(len(names), [len(part) for part in detect({image!r}, confidence=0.0)])\n"
FOLDER = "runs/train/exp"


def documented(page: str, start: str) -> list[str]:
    """Returns the words of the first command of a page that begins with ``start``."""
    matches = [command.words for command in commands(page) if " ".join(command.words).startswith(start)]
    assert matches, f"{page} has no command that begins with: {start}"
    return list(matches[0])


class Clone:
    """A fresh clone, without anything that a checkout has beside it."""

    def __init__(self, root: Path) -> None:
        if shutil.which("git") is None or not (ROOT / ".git").exists():
            pytest.skip("not in a git repository")
        self.folder = root / "lockstep"
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", self.folder], check=True)
        self._home = root

    def run(self, words: list[str], changes: dict[str, str], *, codes: tuple[int, ...] = (0,)) -> str:
        """Runs a command with some of its words replaced; returns what it prints."""
        assert set(changes) <= set(words), (changes, words)
        done = subprocess.run(
            [python(), *(changes.get(word, word) for word in words[1:])],
            cwd=self.folder,
            env={**os.environ, "HOME": str(self._home)},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode in codes, done.stdout[-2000:] + done.stderr
        return done.stdout


@pytest.mark.slow
def test_the_first_two_commands_need_only_a_clone_and_an_empty_home(tmp_path: Path):
    """They install gigabytes, from pip's index. Of the tests, a few run."""
    clone = Clone(tmp_path)
    kept = ("PATH", "LANG", "SSL_CERT_FILE", "PIP_", "UV_")
    environment = {name: value for name, value in os.environ.items() if name.startswith(kept)}
    environment |= {"HOME": str(tmp_path / "home"), "TESTS": "tests/models/postprocess"}
    for command in commands("README.md")[:2]:
        assert command.words[0] == "make", command
        done = subprocess.run(command.words, cwd=clone.folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (clone.folder / "demo" / "train" / "report.html").is_file()
    assert len(list((clone.folder / "demo" / "detect").glob("*.jpg"))) > 1


@pytest.mark.slow
def test_from_clone_to_onnx(tmp_path: Path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    clone = Clone(tmp_path)
    data = write_dataset(tmp_path / "my images", train=32, val=8)
    image = next((data.parent / "images" / "val").iterdir())
    mine = {"DATA.yaml": str(data)}

    check = documented("README.md", "python -m tools.check DATA.yaml")
    assert "8 images" in clone.run(check, mine, codes=(0, 1))

    train = [*documented("README.md", "python train.py --data DATA.yaml --weights yolox_s"), "--device", "cpu"]
    model = str(write_model(tmp_path / "tiny.yaml", TINY_MODEL))  # in place of weights that would be downloaded
    small = {"--weights": "--model", "yolox_s": model, "640": "64", "50": "20"}
    clone.run([*train, "--batch-size", "4"], {**mine, **small})
    clone.run([*train, "--batch-size", "4", "--seed", "1"], {**mine, **small})
    section = (ROOT / "docs" / "training.md").read_text().split("## What a run writes")[1].split("\n## ")[0]
    cells = " ".join(re.findall(r"^\| (.+?) \|", section, re.MULTILINE))
    files = [name for name in re.findall(r"`([^`]+)`", cells) if "*" not in name]
    assert {"report.html", "best.pt", "settings.yaml"} <= set(files)
    assert not [name for name in files if not (clone.folder / FOLDER / name).exists()]

    assert "AP50" in clone.run(documented("README.md", f"python val.py --weights {FOLDER}/best.pt"), {})
    detect = documented("README.md", f"python detect.py --weights {FOLDER}/best.pt --source image.jpg")
    clone.run(detect, {"image.jpg": str(image)})
    assert [path.name for path in (clone.folder / "runs" / "detect" / "exp").glob("[!.]*")] == [image.name]

    export = documented("README.md", f"python export.py --weights {FOLDER}/best.pt --format onnx")
    assert f"{FOLDER}/best.onnx" in clone.run(export, {})
    score = documented("docs/export.md", "python val.py --weights best.onnx")
    assert "AP50" in clone.run(score, {"best.onnx": f"{FOLDER}/best.onnx"})

    (code,) = [b.text for b in blocks("docs/export.md") if "InferenceSession" in b.text]
    (tmp_path / "mine.py").write_text(code + DETECT.format(image=str(image)))
    done = subprocess.run(
        [python(), tmp_path / "mine.py"], cwd=clone.folder / FOLDER, capture_output=True, text=True, timeout=60
    )
    assert re.fullmatch(r"2 \[(\d+), \1, \1\]\n", done.stdout), done.stderr
