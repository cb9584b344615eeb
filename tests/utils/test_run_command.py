"""A command's settings, and its result in the process that has started it."""

from __future__ import annotations

import pytest

from tests.helpers.messages import refused
from utils.config.tool_settings import DemoConfig
from utils.process.launch import torchrun_variables
from utils.process.result_file import read_result
from utils.run_command import CommandResult, run_command


def test_the_work_gets_the_settings_of_the_command_line(result_file):
    seen: list[DemoConfig] = []
    run_command("demo", seen.append, ["folder"])
    assert seen == [DemoConfig(out="folder")]
    assert read_result(result_file) == {}


@pytest.mark.parametrize("exit_status", [0, 1])
def test_a_result_is_written_before_the_command_exits(result_file, exit_status):
    def work(_: DemoConfig) -> CommandResult:
        return CommandResult({"issues": ["blurred"]}, exit_status)

    if exit_status:
        with pytest.raises(SystemExit, match="1"):
            run_command("demo", work, ["folder"])
    else:
        run_command("demo", work, ["folder"])
    assert read_result(result_file) == {"issues": ["blurred"]}


def test_mistakes_and_several_processes_are_refused_before_the_work(monkeypatch):
    def work(_: DemoConfig) -> None:
        pytest.fail("the work has begun")

    with refused("the following arguments are required: OUT"):
        run_command("demo", work, [])
    for name, value in torchrun_variables(0, 2, 29500).items():
        monkeypatch.setenv(name, value)
    with refused("tools.demo runs in one process, but the environment sets 2; start it once"):
        run_command("demo", work, ["folder"])
