"""Mistakes in the flags of val.py are one line."""

from __future__ import annotations

import pytest

import export
import train
import val
from tests.helpers.messages import refused
from tests.helpers.scripts import SMALL, call, error_of, run_python
from tests.helpers.tiny import write_dataset, write_model
from tests.scripts.val.validation import flags


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--imgsz", "65"], "--imgsz 65: not a multiple of the model's stride 32; use 64 or 96"),
        (
            ["--weights", "absent.pt"],
            "absent.pt: neither a file nor the name of public weights; public weights: yolox_nano, "
            "yolox_tiny, yolox_s, yolox_m, yolox_l, yolox_x, yolov9t, yolov9s, yolov9m, yolov9c, yolov5n, "
            "yolov5s, yolov5m, yolov5l, yolov5x, yolov5n6, yolov5s6, yolov5m6, yolov5l6, yolov5x6, yolov8n, "
            "yolov8s, yolov8m, yolov8l, yolov8x, yolo11n, yolo11s, yolo11m, yolo11l, yolo11x, yolo26n, "
            "yolo26s, yolo26m, yolo26l, yolo26x",
        ),
        (
            ["--data", "absent.yaml"],
            "data set absent.yaml: no such file; known by name: demo, bccd, coco, coco128, coco8",
        ),
        (
            ["--task", "test"],
            "data.yaml: has no 'test' split, only val; add 'test: <folder>' (.../best.pt stores the path of "
            "this data set; --data names another)",
        ),
        (["--conf", "2"], "--conf-thres: must be at most 1, got 2"),
        (
            ["--weights", "a.onnx", "--tta"],
            "a.onnx: --tta: only checkpoints are evaluated with several views; leave it out",
        ),
        (["--weights", "a.onnx", "--amp", "bf16"], "a.onnx: cannot be opened (...)"),  # before the file is opened
    ],
)
def test_mistakes_are_user_errors(tiny, tmp_path, more, message):
    (tmp_path / "a.onnx").touch()
    with refused(message):
        val.main(flags(tiny, tmp_path, *more))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("more", "line"),
    [
        pytest.param(["--imgsz", "65"], "error: --imgsz 65", marks=pytest.mark.slow),
        (["--project", "/proc/runs"], "error: /proc/runs/exp: cannot be created"),
    ],
    ids=["both processes fail", "only the first fails"],
)
def test_two_processes_print_an_error_once_and_exit_with_2(tiny, tmp_path, more, line):
    ended = run_python("val.py", *flags(tiny, tmp_path, *more, "--spawn", "2"), code=2)
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("error: ") == ended.stderr.count(line) == 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of one epoch, in that of its data set."""
    root = tmp_path_factory.mktemp("trained")
    data = write_dataset(root / "set", train=4, val=2)
    model = write_model(root / "tiny.yaml")
    given = ["--data", data, "--model", model, *SMALL, "--project", root, "--cache-dir", root]
    call(train.main, *given, "--name", "run", "--epochs", "1")
    return root


@pytest.mark.parametrize("gone", ["data.yaml", "images"])
def test_a_data_set_that_is_gone_is_named_with_the_checkpoint_that_stores_its_path(trained, capsys, gone):
    last = str(trained / "run" / "last.pt")
    (trained / "set" / gone).rename(trained / "set" / "moved")
    commands = (
        (train.main, "--resume", last, "--epochs", "3"),
        (val.main, "--weights", last, "--device", "cpu"),
        (export.main, "--weights", last, "--format", "torchscript"),
    )
    try:
        lines = [error_of(capsys, *command) for command in commands]
        staged = error_of(capsys, *commands[0], "--stage", str(trained / "stage"))
    finally:
        (trained / "set" / "moved").rename(trained / "set" / gone)
    for line in (*lines, staged):
        assert f"{trained}/set/{gone}" in line
        assert line.endswith(f"({last} stores the path of this data set; --data names another)")
        assert "--data " + str(trained) not in line
