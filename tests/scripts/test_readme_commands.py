"""README's commands, on a clone and a user's own folder of images: train, export, compare, and run without us."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.tiny import TINY_MODEL, write_dataset, write_model

ROOT = Path(__file__).parents[2]
DETECT = "\nprint(len(names), [len(part) for part in detect({image!r}, confidence=0.0)])\n"


def readme_command(start: str) -> str:
    """The first line of README.md's code that begins with ``start``, without its comment."""
    found = re.search(
        rf"^ {{4}}({re.escape(start)}.*?)(?: {{2,}}#.*)?$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert found is not None, start
    return found[1]


@pytest.mark.slow
def test_from_clone_to_onnx(tmp_path: Path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not in a git repository")
    clone = tmp_path / "lockstep"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", clone], check=True)
    data = write_dataset(tmp_path / "my images", train=8, val=4)
    model = write_model(tmp_path / "tiny.yaml", TINY_MODEL)

    def run(command: str, **changes: str) -> str:
        words = [changes.get(word, word) for word in command.split()]
        assert set(changes) <= set(command.split())
        done = subprocess.run(
            [sys.executable, *words[1:]],
            cwd=clone,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    train = readme_command("python train.py --data DATA.yaml --model yolov8n")
    small = {"yolov8n": str(model), "640": "64", "100": "1", "16": "4", "0": "cpu"}
    run(train, **{"DATA.yaml": str(data)}, **small)
    export = readme_command("python export.py --weights")
    folder = "runs/train/exp"
    printed = run(export.replace(" openvino torchscript pt2", ""))
    assert f"{folder}/best.onnx" in printed
    val = readme_command("python val.py --weights best.pt best.onnx").replace(" best_openvino_model", "")
    files = {name: f"{folder}/{name}" for name in ("best.pt", "best.onnx")}
    printed = run(val, **files, **{"DATA.yaml": str(data)})
    scores = re.findall(r"best\.(?:pt|onnx) +(\d\.\d+)", printed)
    assert len(scores) == 2
    assert scores[0] == scores[1]

    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (code,) = [block for block in code if "InferenceSession" in block]
    image = next((data.parent / "images" / "val").iterdir())
    (tmp_path / "mine.py").write_text(code + DETECT.format(image=str(image)))
    done = subprocess.run(
        [sys.executable, tmp_path / "mine.py"], cwd=clone / folder, capture_output=True, text=True, timeout=60
    )
    assert re.fullmatch(r"2 \[(\d+), \1, \1\]\n", done.stdout), done.stderr
