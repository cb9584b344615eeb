"""No command opens a network connection, or writes outside of its folders and our cache, unless that was requested.

Libraries open sockets and files of their own, so strace watches the process itself. Its home folder is empty before and
looked at afterwards.
"""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.helpers.repository import ROOT
from tests.helpers.scripts import SMALL
from tests.helpers.strace import require_strace, watch
from tests.helpers.tiny import write_dataset, write_model, write_weights

LOOK_UP = "import socket\ntry:\n    socket.create_connection(('host.example', 80), 5)\nexcept OSError:\n    pass\n"


def test_a_look_up_is_noticed(tmp_path):
    require_strace()
    assert watch(["-c", LOOK_UP], tmp_path / "asks").asked
    silent = watch(["-c", "print('nothing')"], tmp_path / "silent")
    assert (silent.done.stdout, silent.asked, silent.home) == ("nothing\n", [], [])


TRAIN = ["train", "--data", "set/data.yaml", "--model", "tiny.yaml", *SMALL, "--epochs", "1", "--project", "runs"]
SCORED = ["--data", "set/data.yaml", "--project", "runs", "--device", "cpu", "--workers", "0"]
DETECTED = ["--source", "set/images/val", "--project", "runs", "--device", "cpu"]
INPUTS = ["set", "tiny.yaml", "tiny.pt", "ranges.yaml"]
EXPORTED = ["tiny.onnx", "tiny_openvino_model", "tiny_ncnn_model", "tiny.tflite"]
EXPORT = ["export", "--weights", "tiny.pt", "--no-check", "--device", "cpu", "--format"]
# By the packages that they load. A process runs those of one entry.
COMMANDS = {
    ("tensorboard", "albumentations"): [
        [*TRAIN, "--plots", "--set", "albumentations=[{name: Blur, p: 0.5}]"],
        ["detect", "--weights", "runs/exp/last.pt", *DETECTED, "--name", "detect"],
    ],
    ("onnxruntime", "openvino"): [
        [*EXPORT, "onnx", "openvino"],
        ["val", "--weights", "tiny.onnx", *SCORED, "--name", "val"],
        ["detect", "--weights", "tiny_openvino_model", "--trust", *DETECTED, "--name", "openvino"],
    ],
    ("ncnn",): [[*EXPORT, "ncnn"], ["detect", "--weights", "tiny_ncnn_model", "--trust", *DETECTED]],
    ("ai_edge_litert",): [[*EXPORT, "litert"], ["detect", "--weights", "tiny.tflite", "--trust", *DETECTED]],
    ("optuna",): [["tools.search", *TRAIN[1:], "--name", "search", "--hyp", "ranges.yaml", "--trials", "1"]],
    ("trackers",): [["detect", "--weights", "tiny.pt", *DETECTED, "--conf", "0", "--track", "--save-txt"]],
    ("mlflow",): [[*TRAIN, "--tracker", "mlflow"]],
    ("wandb",): [[*TRAIN, "--tracker", "wandb"]],
}
# They ask for nothing in any version that we know, and are tried before a release only.
LONG = [("onnxruntime", "openvino"), ("ncnn",), ("ai_edge_litert",), ("optuna",), ("trackers",)]
RUN = """
import importlib, json, sys
from utils.process.main import run_main

packages, commands = json.loads(sys.argv[1])
for module, *flags in commands:
    run_main(importlib.import_module(module).main, flags)
for package in packages:
    assert package in sys.modules, f"{package} was not loaded"
"""


@pytest.mark.parametrize(
    "packages",
    [
        pytest.param(packages, id="+".join(packages), marks=[pytest.mark.slow] if packages in LONG else [])
        for packages in COMMANDS
    ],
)
def test_no_other_machine_is_asked_and_no_file_is_written_elsewhere(tmp_path, packages):
    require_strace()
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    write_dataset(tmp_path / "set")
    write_model(tmp_path / "tiny.yaml")
    write_weights(tmp_path / "tiny.pt", ["light", "dark"])
    (tmp_path / "ranges.yaml").write_text("lr0: [0.001, 0.05, log]\n")
    program = ["-c", RUN, json.dumps([packages, COMMANDS[packages]])]
    watched = watch(program, tmp_path, PYTHONPATH=str(ROOT), WANDB_MODE="offline")
    assert watched.done.returncode == 0, watched.done.stdout + watched.done.stderr
    assert watched.asked == []
    assert watched.home == []
    assert {path.name for path in tmp_path.iterdir()} <= {*INPUTS, *EXPORTED, "runs", "home", "noted"}
