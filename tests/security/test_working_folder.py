"""SECURITY.md, "Code": the working folder may be the data set of a stranger. No command runs, or reads, what lies there
beside the files that it names, listens to others, or writes there."""

from __future__ import annotations

import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.helpers.repository import ROOT
from tests.helpers.scripts import SMALL
from tests.helpers.strace import watch
from tests.helpers.tiny import write_dataset, write_model, write_weights

OURS = {"configs", "data", "detect", "engine", "export", "hubconf", "launch", "lockstep", "models", "tools", "train"}
MODULES = {*sys.stdlib_module_names, *packages_distributions(), *OURS, "utils", "val", "sitecustomize", "usercustomize"}
PACKAGES = ("numpy", "torch")
FILES = {
    "matplotlibrc": "text.usetex: True\nfont.size: 1\n",  # latex would run
    "wandb/settings": "[default]\nbase_url = http://127.0.0.1:1\n",
    ".env": "WANDB_MODE=online\n",
    "pyproject.toml": "[tool.trap]\n",
    "_ops.py": "",  # torch gives this name to a module of its own
}
# Matplotlib reads the last when it is imported, but figures have its defaults.
OPENED = {"set", "tiny.yaml", "matplotlibrc"}
# A library of torch's CUDA packages looks for it here, and in folders that glibc names after the processor
# (SECURITY.md).
LIBCUDA = "libcuda.so.1"

TRAIN = ["train.py", "--data", "set/data.yaml", "--model", "tiny.yaml", *SMALL[:-1], "--epochs", "1"]
VAL = ["val.py", "--data", "set/data.yaml", "--device", "cpu", "--workers", "0"]
COMMAND = "lockstep/__main__.py"
COMMANDS = {
    "train": TRAIN,
    "train spawn": [*TRAIN, "--spawn", "2"],
    "train compile": [*TRAIN, "--compile"],
    "train spawn compile": [*TRAIN, "--spawn", "2", "--compile"],
    "val": [*VAL, "--weights", "OUT/tiny.pt"],
    "val spawn": [*VAL, "--weights", "OUT/tiny.pt", "--spawn", "2"],
    "detect": ["detect.py", "--weights", "OUT/tiny.pt", "--source", "set/images/val", "--device", "cpu"],
    "export": ["export.py", "--weights", "OUT/tiny.pt", "--no-check", "--format", "onnx", "torchscript", "pt2"],
    "check": [COMMAND, "check", "--data", "set/data.yaml", "--out", "OUT/check"],
    "demo": [COMMAND, "demo", "OUT/demo"],
    "library": ["OUT/program.py"],
}
QUICK = ("train spawn",)
PROGRAM = """
import lockstep
options = dict(imgsz=64, batch_size=4, device="cpu", workers=0, plots=False, project=PROJECT)
run = lockstep.train("set/data.yaml", model="tiny.yaml", epochs=1, spawn=2, **options)
lockstep.export(run.last, format="torchscript", check=False)
"""


@pytest.fixture(scope="module")
def traps(tmp_path_factory) -> Path:
    """A folder with a data set, in which the import of any module leaves a file beside it."""
    folder = tmp_path_factory.mktemp("traps") / "folder"
    write_dataset(folder / "set", train=4, val=2)
    write_model(folder / "tiny.yaml")
    trap = f"open({str(folder.with_name('ran'))!r}, 'a').write(__file__ + chr(10))\n"
    files = {f"{name}.py": trap for name in MODULES - {*PACKAGES} if name.isidentifier()}
    for name, content in (files | FILES | {f"{name}/__init__.py": trap for name in PACKAGES}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    return folder


def content(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS if name not in QUICK)]
)
def test_nothing_but_what_a_command_names_is_used(traps, tmp_path, name):
    out = tmp_path / "out"
    out.mkdir()
    write_weights(out / "tiny.pt", ["light", "dark"])
    (out / "program.py").write_text(PROGRAM.replace("PROJECT", repr(str(out / "runs"))))
    script, *flags = [word.replace("OUT", str(out)) for word in COMMANDS[name]]
    if script.startswith(("train", "val", "detect")):
        flags += ["--project", str(out / "runs")]
    before = content(traps)
    variables = {"PYTHONPATH": str(ROOT)} if name == "library" else {}
    watched = watch([ROOT / script, *flags], tmp_path, traps, **variables)
    assert not traps.with_name("ran").exists(), {*traps.with_name("ran").read_text().split()}
    # Under strace, torch sometimes aborts a process of --spawn as it exits, when all is done.
    is_done = watched.done.returncode == 0 or "done: 1 epoch" in watched.done.stdout
    assert is_done, watched.done.stdout + watched.done.stderr
    assert "latex" not in watched.done.stderr
    assert content(traps) == before
    assert {path.parts[0] for path in watched.opened_below(traps) if path.name != LIBCUDA} <= OPENED
    assert not watched.listens_to_others
    assert watched.home == []
