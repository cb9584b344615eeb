from __future__ import annotations

import random
import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.helpers.messages import refused
from tests.helpers.yolo_lines import PROGRAMS, YOLOV5_HYPERPARAMETERS, check_line, draw_arguments, said
from utils.config import other_programs
from utils.config.other_programs import reason as reason_of
from utils.config.parser import parse_config, read_recipe, with_overrides
from utils.config.settings import Hyperparameters, TrainConfig
from utils.errors import UserError

ROOT = Path(__file__).parents[3]
# The defaults of Ultralytics' args.yaml, where they are not those of YOLOv5's hyper-parameters; all of a detector's.
ARGS = """{
task: detect, mode: train, model: yolov8n.pt, data: d.yaml, epochs: 100, time: null, patience: 100, batch: 16,
imgsz: 640, save: true, save_period: -1, cache: false, device: null, workers: 8, project: null, name: train,
exist_ok: false, pretrained: true, optimizer: auto, verbose: true, seed: 0, deterministic: true,
single_cls: false, cos_lr: false, close_mosaic: 10, resume: false, amp: true, fraction: 1.0, profile: false,
freeze: null, multi_scale: 0.0, compile: false, overlap_mask: true, mask_ratio: 4, dropout: 0.0, val: true,
split: val, save_json: false, conf: null, iou: 0.7, max_det: 300, half: false, dnn: false, plots: true,
end2end: null, source: null, vid_stride: 1, stream_buffer: false, augment: false, agnostic_nms: false,
classes: null, embed: null, show: false, save_frames: false, save_txt: false, show_labels: true,
show_boxes: true, line_width: null, format: torchscript, keras: false, int8: false, simplify: true,
opset: null, workspace: null, nms: false, lr0: 0.01, momentum: 0.937, warmup_bias_lr: 0.1, box: 7.5, cls: 0.5,
cls_pw: 0.0, dfl: 1.5, pose: 12.0, kobj: 1.0, rle: 1.0, angle: 1.0, nbs: 64, bgr: 0.0, mosaic: 1.0,
cutmix: 0.0, copy_paste: 0.0, copy_paste_mode: flip, auto_augment: randaugment, erasing: 0.4, cfg: null,
tracker: botsort.yaml, save_dir: runs/detect/train}
"""


@pytest.mark.parametrize(
    ("script", "arguments", "line"),
    [
        # The mode names the script.
        ("train.py", "detect val model=best.pt data=d.yaml", "val.py --weights best.pt --data d.yaml"),
        ("train.py", "predict model=best.pt source=a/", "detect.py --weights best.pt --source a/"),
        ("train.py", "mode=export model=best.pt half=True", "export.py --weights best.pt --half"),
        ("train.py", "tune data=d.yaml iterations=9", "-m tools.search --data d.yaml --trials 9"),
        ("val.py", "yolo detect train data=d.yaml epochs=3", "train.py --data d.yaml --epochs 3"),
        ("detect.py", "val model=a.pt", "val.py --weights a.pt"),
        ("export.py", "predict model=a.pt source=0", "detect.py --weights a.pt --source 0"),
        ("tools.search", "detect train data=d.yaml", "-m tools.search --data d.yaml"),
        ("tools.kfold", "data=d.yaml epochs=2", "-m tools.kfold --data d.yaml --epochs 2"),
        ("train.py", "val --weights a.pt --half", "val.py --weights a.pt --half"),
        ("val.py", "data=d.yaml", "val.py --data d.yaml --weights WEIGHTS"),
        # The model, and what a run starts from.
        ("train.py", "data=d.yaml model=yolov8n.pt", "train.py --data d.yaml --weights yolov8n.pt"),
        ("train.py", "model=yolo11n.yaml pretrained=yolo11n.pt", "train.py --model yolo11n.yaml --weights yolo11n.pt"),
        ("train.py", "model=yolo11n.yaml pretrained=False", "train.py --model yolo11n.yaml"),
        ("train.py", "model=a.pt pretrained=True", "train.py --weights a.pt"),
        ("train.py", "data=d.yaml model=a.pt resume=True", "train.py --data d.yaml --resume a.pt"),
        ("train.py", "resume=a/last.pt model=b.pt epochs=9", "train.py --resume a/last.pt --epochs 9"),
        ("train.py", "resume=True", "train.py --resume"),
        ("train.py", "resume=False data=d.yaml", "train.py --data d.yaml"),
        # Values.
        ("train.py", "batch=0.7", "train.py --batch-size -1"),
        ("train.py", "batch=-1", "train.py --batch=-1"),
        ("train.py", "lr0 = 0.01 lrf= 0.1 momentum =0.9", "train.py --set lr0=0.01 --set lrf=0.1 --set momentum=0.9"),
        ("train.py", "batch = -1 epochs=3", "train.py --batch=-1 --epochs 3"),
        ("train.py", "lr=0.1 multi_scale=0.25", "train.py --set lr0=0.1 --multi-scale 0.25"),
        ("train.py", "plots=False cos_lr=True cache=True amp=False", "train.py --noplots --cos-lr --cache --amp off"),
        ("train.py", "val=False cache=disk rect=False", "train.py --val-every 0 --cache disk"),
        ("val.py", "model=a.pt rect=False", "val.py --weights a.pt --no-rect"),
        ("train.py", "device=[0, 1] freeze=[0,1] name='my run'", "train.py --device 0,1 --freeze 0 1 --name 'my run'"),
        ("train.py", "freeze=[3] imgsz=[640,480]", "train.py --freeze 3 3 --imgsz 640"),
        ("train.py", "freeze=3 nbs=64 device=None classes=[]", "train.py --freeze 3 --nominal-batch 64"),
        ("train.py", "classes=0,2 fraction=0.5", "train.py --classes 0 2 --fraction 0.5"),
        ("train.py", "optimizer=sgd", "train.py --optimizer SGD"),
        ("train.py", "copy_paste=0 erasing=0.4 iou=.70 verbose=True save_period=-1", "train.py"),
        ("val.py", "model=a.onnx split=test half=True", "val.py --weights a.onnx --task test --amp fp16"),
        ("val.py", "model=a.pt augment=True plots=True nms=True", "val.py --weights a.pt --tta"),
        ("detect.py", "model=a.pt source=a save_txt show_labels=False line_width=2 classes=[0, 2] save=False",
         "detect.py --weights a.pt --source a --save-txt --hide-labels --line-thickness 2 --classes 0 2 --nosave"),
        ("export.py", "export model=a.pt format=onnx half=True nms=True simplify=True imgsz=640,480",
         "export.py --weights a.pt --format onnx --half --layout end2end --imgsz 640 480"),
        ("export.py", "model=yolo26n.pt end2end=False", "export.py --weights yolo26n.pt --nms"),
    ],
)  # fmt: skip
def test_arguments_of_the_yolo_command_become_flags(script: str, arguments: str, line: str):
    assert said(PROGRAMS[script], shlex.split(arguments)) == f"error: settings are flags here; write python {line}\n"


@pytest.mark.parametrize(
    ("script", "arguments", "line"),
    [
        ("train.py", "data=a.yaml epochs=x", r"train.py --data a.yaml. .*: epochs \(.*invalid int value: 'x'\)"),
        ("train.py", "data=a.yaml save_txt=True", r"train.py --data a.yaml. Without an equivalent: save_txt"),
        ("train.py", "copy_paste=0.1", r"train.py. .*: copy_paste \(there is no such augmentation; .*\)"),
        ("train.py", "tracker=botsort.yaml cfg=c.yaml", r"train.py. .*: tracker \(object .*\), cfg \(flags.*\)"),
        ("train.py", "pretrained=b.pt model=a.pt", r"train.py --weights a.pt. .*: pretrained \(use --weights .*\)"),
        ("train.py", "model=a.pt --nosave", r"train.py --weights a.pt. .*: --nosave \(--nosave: last.pt is .*\)"),
        ("train.py", "model= split=test mode=x detct", r"train.py. .*: model \(.*\), split \(.*\), mode, detct"),
        ("train.py", "mosaic=2", r"train.py. .*: mosaic \(--set: mosaic: must be at most 1, got 2.0\)"),
        ("train.py", "'name=a\nb'", r"train.py. .*: name \(its value is empty or has several lines\)"),
        ("val.py", "model=a.pt batch=0.7 val=x", r"val.py --weights a.pt. .*: batch \(.*invalid int.*\), val"),
        ("detect.py", "model=a.pt source=a data=b", r"detect.py .*: data \(the checkpoint contains the class names\)"),
        ("export.py", "model=a.pt format=engine", r"export.py --weights a.pt. .*: format \(trtexec --onnx=best.*\)"),
        ("export.py", "model=a.pt format=foo", r"export.py --weights a.pt. .*: format \(.*invalid choice: 'foo' .*\)"),
    ],
)  # fmt: skip
def test_arguments_without_an_equivalent_are_named_with_the_reason(script: str, arguments: str, line: str):
    text = said(PROGRAMS[script], shlex.split(arguments))
    assert re.fullmatch(rf"error: settings are flags here; write python {line}\n", text), text
    assert check_line(text)


REQUIRED = {
    "val.py": ["--weights", "b.pt"],
    "detect.py": ["--weights", "b.pt", "--source", "c"],
    "export.py": ["--weights", "b.pt"],
}


def rows_of_the_documentation() -> list[tuple[str, str, str]]:
    """The script, what is typed, and what docs/migration.md says of it."""
    text = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8").split("\n## Flags\n")[1].split("\n## ")[0]
    found = []
    for part in text.split("\n### ")[1:]:
        script, *lines = part.splitlines()
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")][2:]
        found += [(script, typed.strip("`"), here) for *cells, here in rows for typed in cells if typed]
    return found


@pytest.mark.parametrize(("script", "typed", "here"), rows_of_the_documentation())
def test_the_documentation_says_what_a_flag_becomes(script: str, typed: str, here: str):
    cls, required = PROGRAMS[script], REQUIRED.get(script, [])
    is_flag = typed.startswith("--")
    text = said(cls, [*required, *typed.split()] if is_flag else [*typed.split(), *required])
    if is_flag and not text and here.startswith("nothing: "):
        why = reason_of(script.removesuffix(".py"), typed.split()[0])
        assert why.startswith(here.removeprefix("nothing: "))
        return
    if not here.startswith("`"):
        nothing = f"error: settings are flags here; write python {shlex.join([script, *required])}\n"
        reason = here.removeprefix("nothing: ")
        assert reason in text or (reason.startswith("it has no effect") and text == nothing)
        return
    assert text == "" if is_flag else check_line(text)
    ours = re.match("`(.*?)`", here)[1].split()
    become = [*required, *typed.split()] if is_flag else shlex.split(text.split(f" python {script}")[1])
    assert parse_config(cls, become, "") == parse_config(cls, [*required, *ours], "")


def test_the_documentation_names_many_flags_of_both_programs():
    typed = [typed for _, typed, _ in rows_of_the_documentation()]
    assert min(sum(t.startswith("--") for t in typed), sum("=" in t and t[0] != "-" for t in typed)) > 30


@pytest.mark.parametrize(
    ("script", "typed", "line"),
    [
        ("train.py", "--img 640 --batch 16 --epochs 3 --data coco128.yaml --weights yolov5s.pt", ""),
        ("train.py", "--data coco.yaml --epochs 300 --weights '' --cfg yolov5n.yaml --batch-size 128", ""),
        ("train.py", "--data coco128.yaml --weights yolov5s.pt --img 640 --freeze 10", ""),
        ("train.py", "--img 640 --rect --cache disk --noval --nosave", "--nosave: last.pt is always written"),
        ("train.py", "--batch 64 --data coco.yaml --weights yolov5s.pt --device 0,1 --sync-bn --exist-ok", ""),
        ("train.py", "--hyp hyp.scratch-low.yaml --multi-scale --image-weights --quad --label-smoothing 0.1", ""),
        ("train.py", "--epochs 10 --data coco128.yaml --cache --evolve", "--evolve: search hyper-parameters"),
        ("train.py", "--resume runs/train/exp/weights/last.pt", ""),
        ("val.py", "--weights yolov5x.pt --data coco.yaml --img 640 --half", ""),
        ("val.py", "--weights yolov5x.pt --data coco.yaml --img 832 --augment --half --iou 0.65 --verbose", ""),
        ("val.py", "--task speed --data coco.yaml --weights yolov5s.pt --batch 1", "--task speed: every validation"),
        ("detect.py", "--weights yolov5s.pt --source 0 --conf 0.25 --classes 0 2 --nosave --view-img", ""),
        ("detect.py", "--weights yolov5s.pt --source a.mp4 --img 640 480", "--img 640 480: .* write --img 640"),
        ("export.py", "--weights yolov5s.pt --include torchscript onnx --imgsz 640 640 --dynamic", ""),
        ("export.py", "--weights yolov5s.pt --include onnx coreml --simplify", "--include coreml: coremltools has"),
        ("export.py", "--weights yolov5s.pt --include onnx --simplify --device 0", ""),
    ],
)  # fmt: skip
def test_command_lines_of_yolov5_are_accepted_or_told_what_to_write(script: str, typed: str, line: str):
    assert re.fullmatch(f"error: {line}.*\n" if line else "", said(PROGRAMS[script], shlex.split(typed)))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("segment train data=d.yaml", "segment: there are no masks, only boxes"),
        ("pose", "pose: there are no keypoints, only boxes"),
        ("task=obb mode=val", "obb: there are no oriented boxes, only upright ones"),
        ("classify predict", "classify: images are not classified, only objects are detected"),
        ("track source=0", "track: objects are not tracked; detect.py detects them in each frame"),
        ("train model=yolov8n-seg.pt", "yolov8n-seg.pt: there are no masks, only boxes; use yolov8n.pt"),
    ],
)
@pytest.mark.parametrize("script", PROGRAMS)
def test_other_tasks_and_modes_are_refused_in_a_line(script: str, arguments: str, line: str):
    assert said(PROGRAMS[script], arguments.split()) == f"error: {line}\n"


@pytest.mark.parametrize("script", PROGRAMS)
def test_every_line_that_is_suggested_is_accepted(script: str):
    lines = set()
    for number in range(120):
        arguments = draw_arguments(random.Random(f"{script}:{number}"))
        if text := said(PROGRAMS[script], arguments):
            lines.add(check_line(text))
    assert len(lines) > 20


def test_command_lines_and_recipes_of_ours_do_not_read_the_table(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(other_programs, "_table", None)
    parse_config(TrainConfig, ["--img", "64", "--no-channels-last", "--set", "lr0=0.1", "--freeze", "0", "1"], "")
    read_recipe("finetune", pretrained=True)
    with refused():
        parse_config(TrainConfig, ["--batch=0", "--data", "a.yaml"], "")


def write(path: Path, values: dict) -> str:
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return str(path)


def test_a_recipe_of_yolov5_is_used_and_what_has_no_effect_is_named(tmp_path: Path):
    lines: list[str] = []
    hyp = read_recipe(write(tmp_path / "low.yaml", YOLOV5_HYPERPARAMETERS), pretrained=False, lines=lines)
    assert hyp == Hyperparameters(lr0=0.01, warmup_bias_lr=0.1)
    scale, weights = "for YOLOv5's losses, which are divided differently", "the losses have no positive weights"
    assert lines == [
        f"{tmp_path}/low.yaml: without effect here: box 0.05 ({scale}), cls 0.5 ({scale}), cls_pw 1.0 ({weights}), "
        f"obj 1.0 ({scale}), obj_pw 1.0 ({weights}), iou_t 0.2 (YOLOv5 does not use it either), "
        "fl_gamma 0.0 (there is no focal loss), copy_paste 0.0"
    ]


def test_a_recipe_names_all_lines_without_an_equivalent_at_once(tmp_path: Path):
    changed = {"cls": 0.3, "cls_pw": 0.5, "fl_gamma": 1.5, "copy_paste": 0.1, "anchors": 3, "lr": 0.1, "mosaik": None}
    flags = {"epochs": 100, "label_smoothing": 0.1, "nbs": 64}
    path = write(tmp_path / "high.yaml", YOLOV5_HYPERPARAMETERS | changed | flags | {7: 8})
    with refused():
        read_recipe(path, pretrained=False)
    many = write(tmp_path / "many.yaml", {f"x{number}": 1 for number in range(100)})
    with pytest.raises(UserError, match=r"many\.yaml: unknown key 'x0'; .* \.\.\. .*unknown key 'x99'"):
        read_recipe(many, pretrained=False)


def test_gains_count_unless_the_recipe_is_yolov5s(tmp_path: Path):
    hyp = read_recipe(write(tmp_path / "own.yaml", {"box": 0.05, "cls": 0.3, "obj": 0.7}), pretrained=False)
    assert (hyp.box, hyp.cls, hyp.obj) == (0.05, 0.3, 0.7)
    with refused():
        read_recipe(write(tmp_path / "tuned.yaml", {"box": 7.1, "cls_pw": 1.0}), pretrained=False)
    assert read_recipe(write(tmp_path / "tuned.yaml", {"box": 7.1, "cls_pw": 0.0}), pretrained=False).box == 7.1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": "SGD", "epochs": 3, "patience": 0, "workers": -1, "deterministic": False, "close_mosaic": None,
          "nbs": None, "device": [0, 1], "box": 5.0, "copy_paste": 0.5, "name": None},
    ],
)  # fmt: skip
def test_args_yaml_becomes_a_command_line(tmp_path: Path, changes: dict):
    path = write(tmp_path / "args.yaml", yaml.safe_load(ARGS) | changes)
    with refused() as caught:
        read_recipe(path, pretrained=False)
    assert check_line(f"error: {caught.value}\n")


@pytest.mark.parametrize(
    "item",
    [
        "lr=0.1",
        "cls_pw=1",
        "obj_pw=1",
        "epochs=3",
        "lr0=\udc80",
    ],
)
def test_hyperparameters_that_do_not_exist(item: str):
    with refused():
        with_overrides(Hyperparameters(), [item])
