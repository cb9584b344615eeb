"""Command lines become settings, mistakes one line, and settings the command line of a child process."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from tests.helpers.messages import refused
from tests.helpers.repository import ROOT
from utils.config.commands import COMMANDS, Command
from utils.config.flags import flag_name, words_of_settings
from utils.config.parser import parse_command, parse_config, settings_of_child
from utils.config.settings import (
    FIRST_SETTINGS,
    ON_RESUME,
    PATHS,
    SCOPES,
    TOPICS,
    DetectConfig,
    ExportConfig,
    Hyperparameters,
    TrainConfig,
    ValConfig,
    changed_settings,
)
from utils.config.tool_settings import SearchConfig
from utils.errors import UserError
from utils.schema import build

ALL = [command.settings for command in COMMANDS.values()]


def required(cls: type) -> dict[str, str]:
    fields = dataclasses.fields(cls)
    return {f.name: "a.b" for f in fields if f.default is f.default_factory is dataclasses.MISSING}


def test_flags_override_defaults():
    config = parse_config(TrainConfig, ["--img", "320", "--batch_size", "8", "--freeze", "0", "3", "--cos-lr"])
    assert config == TrainConfig(imgsz=320, batch_size=8, freeze=[0, 3], cos_lr=True)
    argv = ["--epochs", "100", "--resume", "--set", "lr0=1", "--noval", "--no-cos-lr"]
    assert parse_command(TrainConfig, argv).explicit_flags == {"epochs", "resume", "override", "val_every", "cos_lr"}


def test_a_choice_that_is_called_none_is_that_choice():
    line = ["--data", "demo", "--hyp", "ranges.yaml", "--pruner", "none"]
    assert parse_config(SearchConfig, line).pruner == "none"


@pytest.mark.parametrize("cls", ALL)
def test_paths_of_outputs_may_begin_with_the_home_folder(cls, monkeypatch):
    """A shell does not expand it in ``--out=~/new``; a folder called ~ would be created."""
    monkeypatch.setenv("HOME", "/home/me")
    needed = required(cls)
    for name in [f.name for f in dataclasses.fields(cls) if f.name in ("project", "out", "target")]:
        argv = [f"{flag_name(key)}={value}" for key, value in (needed | {name: "~/new"}).items()]
        assert getattr(parse_config(cls, argv), name) == "/home/me/new"


def test_a_run_is_never_in_the_folder_of_all_runs_or_above_it():
    """``--name "$RUN"`` with an unset variable would otherwise continue whatever was trained there before."""
    for name in ("", " ", ".", "..", "/", "../other", "a/.."):
        with refused(f"--name: {name!r} is not the name of a new folder; choose another, such as exp"):
            parse_config(TrainConfig, ["--resume", "auto", f"--name={name}"])
    for name in ("v1.5", "a/b", "/elsewhere/exp", "..."):
        assert parse_config(TrainConfig, [f"--name={name}"]).name == name


@pytest.mark.parametrize(
    ("cls", "line", "message"),
    [
        (TrainConfig, "--epochs=0", "--epochs"),
        (TrainConfig, f"--seed={2**63}", "--seed"),
        (TrainConfig, "--amp FP8", "--amp"),
        (TrainConfig, "--epochs", "--epochs"),
        (TrainConfig, "--name=a\u2028b", "--name"),
        (TrainConfig, "--epochs many", "--epochs"),
        (ValConfig, "--weights=", "--weights"),
        (ExportConfig, "--weights a.pt --format onnx caffe", "--format"),
        (DetectConfig, "--weights a.pt", "--source"),
        (TrainConfig, "--exist-ok True", "unrecognized arguments: True "),
        (ExportConfig, "--weights a.pt --simplify --half False", "unrecognized arguments: False "),
        # A pattern that the shell has expanded.
        (DetectConfig, "--weights a.pt --source a.jpg b.jpg c.jpg", "unrecognized arguments: b.jpg c.jpg "),
    ],
)
def test_wrong_flags_and_values_are_one_line_that_names_them(cls, line, message):
    with pytest.raises(UserError, match=message) as error:
        parse_config(cls, line.split(" "))  # the name contains a line separator
    assert len(str(error.value).splitlines()) == 1


def test_all_mistakes_of_a_command_line_are_named_at_once():
    with pytest.raises(UserError) as error:
        parse_config(DetectConfig, ["--source", "a.jpg", "--conf", "2", "--vid-stride", "x", "--track", "y", "--foo"])
    assert len(error.value.parts) == 5


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["--noplots", "--cos-lr", "--workers", "-1", "--batch-size", "-1", "--data", "caf\udce9.yaml"],
        ["--set", "lr0=0.01", "mosaic=0", "--freeze", "1", "2", "--resume", "--cache", "--imgsz", "96"],
        ["--classes", "cat", "[b]", "--export", "onnx", "torchscript", "--freeze", "3"],
        ["--project", '["a"]', "--fitness=-x", "--callbacks=-1:f", "--cache-dir=a"],
        ["--resume", "a b/last.pt", "--cls-pw", "1e-05", "--project", "x=y", "--fitness", "AP:a b"],
    ],
)
def test_a_process_that_is_started_gets_all_settings_and_flags_say_those_that_differ_from_the_defaults(line):
    config = parse_config(TrainConfig, line)
    word, variables = settings_of_child(config)
    assert all(text.isascii() for text in variables.values())  # any system can pass them on
    os.environ |= variables
    command = parse_command(TrainConfig, [word])
    assert not variables.keys() & os.environ.keys()
    assert command.config == config
    assert command.explicit_flags == {field.name for field in dataclasses.fields(config)}  # a resumed run takes all
    assert parse_config(TrainConfig, words_of_settings(changed_settings(config))) == config


def test_a_process_that_is_started_may_get_some_settings():
    word, variables = settings_of_child(TrainConfig(epochs=3, export=[], patience=7), ["epochs", "export"])
    os.environ |= variables
    command = parse_command(TrainConfig, [word])
    assert command.config == TrainConfig(epochs=3)
    assert command.explicit_flags == {"epochs", "export"}  # a resumed run takes these, also those at their defaults


@pytest.mark.parametrize("cls", [*ALL, Hyperparameters])
def test_every_setting_has_help_and_a_valid_default(cls):
    assert all(field.metadata["help"] for field in dataclasses.fields(cls))
    build(cls, dataclasses.asdict(cls(**required(cls))), "defaults")


def test_tables_of_settings_name_settings():
    known = {field.name for cls in ALL for field in dataclasses.fields(cls)}
    topics = " ".join([FIRST_SETTINGS, *TOPICS.values()]).split()
    assert known >= {*topics}
    assert {field.name for field in dataclasses.fields(SearchConfig)} >= SCOPES["machine"] | SCOPES["run"]
    trained = {field.name for field in dataclasses.fields(TrainConfig)}
    named = [*PATHS, *(name for names in ON_RESUME.values() for name in names)]
    assert trained >= {*named}
    assert sum(map(len, ON_RESUME.values())) == len(set().union(*ON_RESUME.values()))


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_help_imports_nothing_heavy_and_names_the_command(command: Command):
    code = f"""
import sys, runpy
sys.argv = ["x", "--help"]
try:
    runpy.run_module({command.module!r}, run_name="__main__")
except SystemExit as end:
    assert not end.code
heavy = {{"torch", "cv2", "numpy", "albumentations", "matplotlib", "tensorboard", "optuna"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {command.typed} ")
