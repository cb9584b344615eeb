from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys

import pytest

from tests.helpers.messages import refused
from tests.helpers.repository import ROOT
from utils.config.commands import COMMANDS, Command
from utils.config.flags import flags_of
from utils.config.parser import build_parser, parse_command, parse_config, settings_of_child
from utils.config.settings import DetectConfig, ExportConfig, Hyperparameters, TrainConfig, ValConfig, names_with
from utils.config.tool_settings import (
    CheckConfig,
    ConvertConfig,
    DemoConfig,
    KfoldConfig,
    SearchConfig,
    ShardConfig,
    WeightsConfig,
)
from utils.errors import UserError
from utils.logger import configure_logging
from utils.schema import build


def test_flags_override_defaults():
    config = parse_config(TrainConfig, ["--img", "320", "--batch_size", "8", "--freeze", "0", "3", "--cos-lr"])
    assert (config.imgsz, config.batch_size, config.freeze, config.cos_lr) == (320, 8, [0, 3], True)
    assert config.resume is None
    assert parse_config(TrainConfig, ["--resume"]).resume == ""
    assert parse_config(TrainConfig, ["--no-cos-lr"]).cos_lr is False
    assert parse_config(TrainConfig, ["--seed", str(2**63 - 1)]).seed == 2**63 - 1
    argv = ["--epochs", "100", "--resume", "--set", "lr0=1"]
    assert parse_command(TrainConfig, argv).explicit_flags == {"epochs", "resume", "override"}
    assert parse_command(TrainConfig, ["--noval"]).explicit_flags == {"val_every"}


@pytest.mark.parametrize(
    ("cls", "argv", "name"),
    [
        *((cls, "--data=demo --project=~/new", "project") for cls in (TrainConfig, KfoldConfig, SearchConfig)),
        (ValConfig, "--weights=a.pt --project ~/new", "project"),
        (DetectConfig, "--weights=a.pt --source=a.jpg --project=~/new", "project"),
        (CheckConfig, "a.yaml --out=~/new", "out"),
        (ConvertConfig, "export ~/new", "out"),
        (ShardConfig, "a.yaml ~/new", "out"),
        (WeightsConfig, "a.pt ~/new", "target"),
        (DemoConfig, "~/new", "out"),
    ],
)
def test_paths_of_outputs_may_begin_with_the_home_folder(cls, argv, name, monkeypatch):
    """A shell does not expand it in ``--out=~/new``; a folder called ~ would be created."""
    monkeypatch.setenv("HOME", "/home/me")
    assert getattr(parse_config(cls, argv.split()), name) == "/home/me/new"


@pytest.mark.parametrize("name", ["", " ", ".", "..", "/", "../other", "a/.."])
@pytest.mark.parametrize("argv", [[], ["--resume", "auto"], ["--exist-ok"]])
def test_a_run_is_never_in_the_folder_of_all_runs_or_above_it(name, argv):
    """``--name "$RUN"`` with an unset variable would otherwise continue whatever was trained there before."""
    with refused(f"--name: {name!r} is not the name of a new folder; choose another, such as exp"):
        parse_config(TrainConfig, [*argv, f"--name={name}"])


@pytest.mark.parametrize("name", ["exp", "v1.5", "a/b", "/elsewhere/exp", "..."])
def test_the_name_of_a_run_may_contain_folders(name):
    assert parse_config(TrainConfig, [f"--name={name}"]).name == name


@pytest.mark.parametrize(
    ("cls", "line"),
    [
        (TrainConfig, "--epochs=0"),
        (TrainConfig, "--batch=-2"),
        (TrainConfig, f"--seed={2**63}"),
        (TrainConfig, "--amp FP8"),
        (TrainConfig, "--epochs"),
        (TrainConfig, "--name=a\u2028b"),
        (TrainConfig, "--epochs many"),
        (ValConfig, "--weights="),
        (ExportConfig, "--weights a.pt --format onnx caffe"),
        (DetectConfig, "--weights a.pt"),
    ],
)
def test_wrong_flags_and_values_are_one_line_that_names_the_flag(cls, line):
    with pytest.raises(UserError) as error:
        parse_config(cls, line.split(" "))  # the name contains a line separator
    assert "\n" not in str(error.value)
    assert re.search("--(epochs|batch|seed|amp|imgsz|exist-ok|set|name|weights|format|source)", str(error.value))


@pytest.mark.parametrize(
    ("cls", "line", "words"),
    [
        (TrainConfig, "--exist-ok True", "True"),
        (ExportConfig, "--weights a.pt --simplify --half False", "False"),
        (DetectConfig, "--weights a.pt --source a.jpg b.jpg c.jpg", "b.jpg c.jpg"),  # a pattern that the shell expanded
    ],
)
def test_words_that_no_flag_takes_are_named(cls, line, words):
    with pytest.raises(UserError, match=f"^unrecognized arguments: {words} "):
        parse_config(cls, line.split())


def test_all_mistakes_of_a_command_line_are_named_at_once():
    with pytest.raises(UserError) as error:
        parse_config(DetectConfig, ["--source", "a.jpg", "--conf", "2", "--vid-stride", "x", "--track", "y", "--foo"])
    assert len(error.value.parts) == 5


def test_words_after_the_end_of_flags_are_taken_as_they_are():
    config = parse_config(ConvertConfig, ["--max-bad", "0.5", "--", "--my_folder", "--max-bad"])
    assert (config.source, config.out, config.max_bad) == ("--my_folder", "--max-bad", 0.5)
    config = parse_config(ConvertConfig, ["--", "--max-bad", "--max-bad"])
    assert (config.source, config.out, config.max_bad) == ("--max-bad", "--max-bad", 0.1)


def test_flags_that_are_left_out_are_named_once_there_is_a_log(capsys):
    for _ in range(2):
        parse_config(TrainConfig, ["--local-rank=0"])
    assert capsys.readouterr().out == ""
    for _ in range(2):
        configure_logging(True)
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["--noplots", "--cos-lr", "--workers", "-1", "--batch-size", "-1"],
        ["--set", "lr0=0.01", "mosaic=0", "--freeze", "1", "2", "--resume", "--cache", "--imgsz", "96"],
        ["--classes", "cat", "[b]", "--export", "onnx", "torchscript", "--freeze", "3"],
        ["--project", '["a"]', "--fitness=-x", "--callbacks=-1:f", "--cache-dir=a"],
        ["--resume", "a b/last.pt", "--cls-pw", "1e-05", "--project", "x=y", "--fitness", "AP:a b"],
        ["--data", "caf\udce9.yaml"],
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
    assert parse_config(TrainConfig, flags_of(config)) == config


def test_a_process_that_is_started_may_get_some_settings():
    word, variables = settings_of_child(TrainConfig(epochs=3, export=[], patience=7), ["epochs", "export"])
    os.environ |= variables
    command = parse_command(TrainConfig, [word])
    assert command.config == TrainConfig(epochs=3)
    assert command.explicit_flags == {"epochs", "export"}  # a resumed run takes these, also those at their defaults
    with refused("settings: epochs: must be at least 1, got 0"):
        os.environ |= dict.fromkeys(variables, '{"epochs": 0}')
        parse_command(TrainConfig, [word])


@pytest.mark.parametrize("cls", [TrainConfig, ValConfig, DetectConfig, ExportConfig, Hyperparameters])
def test_every_setting_has_help_and_a_valid_default(cls):
    for field in dataclasses.fields(cls):
        assert field.metadata["help"], field.name
    fields = [f for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING]
    required = {f.name: ["x"] if f.type.startswith("list") else "x" for f in fields}
    build(cls, dataclasses.asdict(cls(**required)), "defaults")


def test_a_setting_of_several_commands_that_train_or_score_has_one_scope():
    """Subclasses set other defaults, and must say the scope again."""
    scopes: dict[str, set[str]] = {}
    for cls in (TrainConfig, ValConfig, KfoldConfig, SearchConfig):
        for field in dataclasses.fields(cls):
            scopes.setdefault(field.name, set()).add(field.metadata["rules"].scope)
    assert {name for name, names in scopes.items() if len(names) > 1} == set()
    assert names_with(TrainConfig, scope="machine") >= {"device", "workers"}


def test_the_help_of_train_shows_what_the_first_months_need():
    flags = set(re.findall(r"^  (--[a-z-]+)", build_parser(TrainConfig).format_help(), re.M))
    assert {"--data", "--weights", "--epochs", "--batch-size", "--imgsz", "--device", "--resume"} <= flags
    assert "--help-all" in flags
    assert len(flags) < 26


def test_a_setting_without_a_topic_has_a_flag(monkeypatch):
    monkeypatch.setattr("utils.config.parser.TOPICS", {})
    assert "--megabytes" in build_parser.__wrapped__(ShardConfig).format_help()


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
