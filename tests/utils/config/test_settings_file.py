"""All settings of a command, handed to a process that this program starts."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict, fields

import pytest

from tests.helpers.messages import refused
from tests.helpers.repository import ROOT
from utils.config.flags import flags_of
from utils.config.parser import parse_command, parse_config
from utils.config.settings import TrainConfig
from utils.config.settings_file import PREFIX, settings_file

COMMAND_LINES = [
    [],
    ["--noplots", "--cos-lr", "--workers", "-1", "--batch-size", "-1"],
    ["--set", "lr0=0.01", "mosaic=0", "--freeze", "1", "2", "--resume", "--cache", "--imgsz", "96"],
    ["--classes", "cat", "[b]", "--export", "onnx", "torchscript"],
    ["--project", '["a"]', "--fitness=-x", "--callbacks=-1:f", "--cache-dir=a"],
    ["--resume", "a b/last.pt", "--cls-pw", "1e-05", "--project", "x=y", "--fitness", "AP:a b"],
]


@pytest.mark.parametrize("argv", COMMAND_LINES)
def test_a_file_gives_all_settings_and_flags_those_that_differ_from_the_defaults(argv):
    config = parse_config(TrainConfig, argv)
    with settings_file(config) as word:
        command = parse_command(TrainConfig, [word])
    assert command.config == config
    assert command.explicit_flags == {field.name for field in fields(TrainConfig)}  # a run that continues takes all
    assert parse_config(TrainConfig, flags_of(config)) == config
    with refused("...settings.json: no such file"):
        parse_config(TrainConfig, [word])


def test_a_file_may_give_some_settings():
    config = TrainConfig(epochs=3, export=[], patience=7)
    with settings_file(config, ["epochs", "export"]) as word:
        command = parse_command(TrainConfig, [word])
    assert command.config == TrainConfig(epochs=3)
    assert command.explicit_flags == {"epochs", "export"}  # a resumed run takes these, also those at their defaults


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("epochs=3", "...: not a file of settings"),
        ('{"epocs": 3}', "...: unknown key 'epocs' (did you mean 'epochs'?)"),
        ("[]", "...: not a file of settings"),
        ("null", "...: not a file of settings"),
        ('{"epochs": 0}', "...: epochs: must be at least 1, got 0"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    (tmp_path / "a.json").write_text(content)
    with refused(message):
        parse_config(TrainConfig, [f"{PREFIX}{tmp_path}/a.json"])


def test_names_that_are_no_utf8_arrive():
    config = TrainConfig(data="caf\udce9.yaml")
    with settings_file(config) as word:
        assert asdict(parse_config(TrainConfig, [word])) == asdict(config)


KILLED = """
import os, sys
from utils.config.settings import TrainConfig
from utils.config.settings_file import settings_file
from utils.process.child import start_child
with settings_file(TrainConfig()), start_child(["true"]) as child:
    child.wait()
    os.kill(os.getpid(), int(sys.argv[1]))
"""


def test_the_next_start_removes_the_files_of_a_killed_process(tmp_path):
    """Other users can neither read them nor write settings, which may name code."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    for number, left in ((9, 2), (0, 0)):
        subprocess.run([sys.executable, "-c", KILLED, str(number)], env=environment, check=False)
        folders = list(tmp_path.iterdir())
        assert len(folders) == left
        assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)
