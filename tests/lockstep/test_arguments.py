"""Arguments of the functions become the settings of a command, or are refused in one line."""

from __future__ import annotations

import json

import numpy as np
import pytest

import lockstep
from lockstep.keywords import parse_keywords
from tests.helpers.messages import refused
from tests.lockstep.script_command import PRINT_SETTINGS, Hooks
from utils.config.recipes import read_recipe
from utils.config.settings import Hyperparameters


def test_keywords_become_the_settings_of_the_command(command, tmp_path, capsys):
    command(f"{PRINT_SETTINGS}; write_result(folder='a')")
    run = lockstep.val(tmp_path / "best.pt", device=0, rect=False, tta=True, iou_thres=None, imgsz=320)
    assert run.folder == tmp_path / "a"
    name, settings = json.loads(capsys.readouterr().out)
    assert name == "val"
    assert settings == {"weights": str(tmp_path / "best.pt"), "device": "0", "rect": False, "tta": True, "imgsz": 320}
    given = {"lr0": 0.01, "close_mosaic": 3, "freeze": [1, 2], "cache": True, "batch": 8, "tracker": []}
    parsed = parse_keywords("train", {}, given)
    assert parsed.explicit_flags == {"override", "freeze", "cache", "batch_size", "tracker"}
    config = parsed.config
    assert config.override == ["lr0=0.01", "close_mosaic=3"]
    assert (config.freeze, config.cache, config.batch_size) == ([1, 2], "ram", 8)


def test_numbers_and_arrays_of_numpy_are_settings():
    given = {"classes": np.array([0, 1]), "freeze": np.zeros(0, int), "epochs": np.int64(3), "lr0": np.float32(0.5)}
    config = parse_keywords("train", {}, given | {"cos_lr": np.bool_(True)}).config
    assert (config.classes, config.freeze, config.epochs, config.cos_lr) == (["0", "1"], [], 3, True)
    assert config.override == ["lr0=0.5"]


def test_none_is_the_null_of_the_hyperparameters_whose_type_says_so():
    """For all others, None is as if not given. `lr_mult=None` was, too: a training from weights used 1."""
    optional = {name for name, hint in Hyperparameters.__annotations__.items() if "None" in str(hint)}
    assert optional == {"lr0", "lr_mult", "close_mosaic", "close_scale"}
    given = dict.fromkeys(["weights", "epochs", *Hyperparameters.__annotations__])
    parsed = parse_keywords("train", {"hyp": "scratch"}, given)
    assert parsed.explicit_flags == {"hyp", "override"}
    config = parsed.config
    assert sorted(config.override) == sorted(f"{name}=null" for name in optional)
    assert read_recipe("scratch", [], pretrained=True).lr_mult == 1.0
    assert read_recipe(config.hyp, config.override, pretrained=True).lr_mult is None
    unset = dict.fromkeys(["weights", "iou_thres", "plots"])
    assert parse_keywords("val", {"weights": "a.pt"}, unset).explicit_flags == {"weights"}
    assert "lr_mult: learning rate factor of loaded parameters; None: by how well `weights` " in lockstep.train.__doc__


@pytest.mark.parametrize("classes", [["-bg"], ["-bg", "cat"], ["cat", "-bg"], ["--resume"], ['["cat"]']])
def test_names_that_look_like_flags_are_settings(classes):
    assert parse_keywords("train", {}, {"classes": classes}).config.classes == classes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": 0}, "epochs: must be at least 1, got 0"),
        ({"epocs": 1}, "epocs=1: unknown (did you mean 'epochs'?)"),
        ({"lr0": "x"}, "lr0: must be a number or null, got 'x'"),
        ({"half": True}, "half=True: use `amp` bf16 or `amp` fp16; `amp` auto uses bf16 if the device supports it"),
        (
            {"resume": True},
            'resume=True: call lockstep.resume(RUN); resume="auto" of lockstep.train starts or continues the run of a '
            "name",
        ),
        ({"devices": 2, "spawn": 4}, "devices=2, spawn=4: both set the number of processes; give only one of them"),
        ({"pretrained": True}, "pretrained=True: name the weights to start from with weights"),
        ({"pretrained": False, "weights": "a.pt"}, "pretrained=False: name the weights to start from with weights"),
        (
            {"override": ["lr0=1"]},
            "override=['lr0=1']: hyper-parameters are keywords of lockstep.train, such as lr0=0.01",
        ),
    ],
)
def test_mistakes_in_settings(given, message):
    with refused(message, lockstep.Error):
        lockstep.train(**given)


def test_arguments_of_ultralytics_that_say_what_happens_anyway_are_accepted(command, capsys):
    command(f"{PRINT_SETTINGS}; write_result(folder='a')")
    lockstep.train("b.yaml", resume=False, pretrained=False, task="detect", mode="train")
    assert json.loads(capsys.readouterr().out)[1] == {"data": "b.yaml"}
    lockstep.train("b.yaml", pretrained=True, weights="a.pt")
    assert json.loads(capsys.readouterr().out)[1] == {"data": "b.yaml", "weights": "a.pt"}


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_lists_of_ultralytics_are_one_value(kind, capsys):
    """Their flags take one word, not several."""
    config = parse_keywords("train", {}, {"device": kind([0, 1]), "imgsz": kind([640, 640])}).config
    assert (config.device, config.imgsz) == ("0,1", 640)
    assert capsys.readouterr().out == ""
    weights = {"weights": "a.pt"}
    assert parse_keywords("val", weights, {"imgsz": kind([480, 640])}).config.imgsz == 640
    assert capsys.readouterr().out == "imgsz=[480, 640]: used as 640, the larger side\n"
    assert parse_keywords("export", weights, {"imgsz": kind([480, 640])}).config.imgsz == [480, 640]
    assert parse_keywords("val", weights, {"imgsz": kind([[480]])}).config.imgsz == 480


@pytest.mark.parametrize(
    ("command_name", "given", "message"),
    [
        ("train", {"project": ["a", "b"]}, "project=['a', 'b']: must be one value, not a list"),
        ("train", {"epocs": None}, "epocs=None: unknown (did you mean 'epochs'?)"),
        ("val", {"lr0": None}, "lr0=None: unknown"),
        ("val", {"box": 7.0}, "box=7.0: unknown"),
        ("export", {"lr0": 1}, "lr0=1: unknown"),
        ("check", {"epochs": 3}, "epochs=3: unknown"),
        (
            "check",
            {"json": True},
            "json=True: functions return their results; lockstep.check returns what `lockstep check --json` prints",
        ),
        ("train", {"mosaik": 1}, "mosaik=1: unknown (did you mean 'mosaic'?)"),
    ],
)
def test_keywords_that_a_command_cannot_use_are_refused_without_suggesting_them(command_name, given, message):
    with pytest.raises(lockstep.Error) as error:
        parse_keywords(command_name, {"weights": "a.pt", "data": "a.yaml"}, given)
    assert str(error.value) == message


def test_keywords_that_change_nothing_are_a_line(capsys):
    given = {"verbose": False, "val": True, "plots": True, "augment": True, "cache": False, "amp": False, "nbs": 64}
    parsed = parse_keywords("train", {}, given)
    assert parsed.explicit_flags == {"amp", "cache", "nominal_batch"}
    assert (parsed.config.amp, parsed.config.nominal_batch) == ("off", 64)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "verbose=False: without effect (there is one level of detail)"
    assert [line.split("=")[0] for line in lines] == ["verbose", "val", "plots", "augment"]


def test_callbacks_that_another_process_cannot_import_are_refused():
    class Local:
        pass

    main = type("Hooks", (), {"__module__": "__main__"})
    for callbacks, message in (
        (
            Local,
            "callbacks: test_callbacks_that_another_process_cannot_import_are_refused.<locals>.Local: the "
            "processes of the training cannot import it; put a class or a function into a file of its own, "
            "such as hooks.py, and give callbacks='hooks:NAME'",
        ),
        (
            Hooks(),
            "callbacks: Hooks: the processes of the training cannot import it; put a class or a function into "
            "a file of its own, such as hooks.py, and give callbacks='hooks:NAME'",
        ),
        (
            main,
            "callbacks: Hooks: the processes of the training cannot import it; put a class or a function into "
            "a file of its own, such as hooks.py, and give callbacks='hooks:NAME'",
        ),
        (
            lambda run: None,
            "callbacks: test_callbacks_that_another_process_cannot_import_are_refused.<locals>.<lambda>: the "
            "processes of the training cannot import it; put a class or a function into a file of its own, "
            "such as hooks.py, and give callbacks='hooks:NAME'",
        ),
    ):
        with refused(message, lockstep.Error):
            lockstep.train(callbacks=callbacks)


def test_the_number_of_devices_may_be_of_numpy(command, capsys):
    command(f"{PRINT_SETTINGS}; write_result(folder='a')")
    lockstep.train(devices=np.int64(2))
    lockstep.train(devices=1)
    settings = [json.loads(line)[1] for line in capsys.readouterr().out.splitlines()]
    assert settings == [{"data": "demo", "spawn": 2}, {"data": "demo"}]


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("train", {"devices": 0}, "devices: must be at least 1, got 0"),
        ("train", {"devices": -1}, "devices: must be at least 1, got -1"),
        ("resume", {"devices": "2"}, "devices: must be a whole number, got '2'"),
        ("train", {"devices": None}, "devices: must be a whole number, got None"),
        ("train", {"devices": [0, 1]}, "devices: must be a whole number, got [0, 1]"),
        ("train", {"data": None}, "data: must be text, got None"),
        ("train", {"data": {}, "project": np.array([1, 2])}, "project=[1, 2]: must be one value, not a list"),
        ("train", {"resume": np.array([1, 2])}, "resume=array([1, 2]): call lockstep.resume(RUN); ..."),
        ("train", {"resume": lockstep.Run("/a")}, "resume=Run('/a'): call lockstep.resume(RUN); ..."),
        ("resume", {"run": None}, "run: must be text, got None"),
        ("val", {"weights": 3}, "weights: must be text, got 3"),
        ("val", {"weights": lockstep.Run("/a")}, "weights: Run('/a') is a run; give its checkpoint .best or .last"),
        ("export", {"weights": lockstep.Run("/a")}, "weights: Run('/a') is a run; give its checkpoint .best or .last"),
        ("export", {"weights": b"a.pt"}, "weights: must be text, ..., got an object of type bytes"),
    ],
)
def test_arguments_of_another_type_are_refused_by_name(command, name, given, message):
    command("write_result(folder='a', files=[])")  # so that no training starts if it is not refused
    with refused(message, lockstep.Error):
        getattr(lockstep, name)(**given)
