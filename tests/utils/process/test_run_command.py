"""A command gets the settings of its command line; unusable ones are refused before it starts."""

from __future__ import annotations

import pytest

from tests.helpers.messages import refused
from utils.config.tool_settings import DemoConfig
from utils.errors import PeerFailure, UserError
from utils.process.launch import torchrun_variables
from utils.process.run_command import run_command


def test_the_work_gets_the_settings_of_the_command_line():
    seen: list[DemoConfig] = []
    run_command("demo", seen.append, ["folder"])
    assert seen == [DemoConfig(out="folder")]


def test_mistakes_and_several_processes_are_refused_before_the_work(monkeypatch):
    def work(_: DemoConfig) -> None:
        pytest.fail("the work has begun")

    with refused("the following arguments are required: OUT"):
        run_command("demo", work, [])
    for rank, error in ((0, UserError), (1, PeerFailure)):  # rank 1 waits until rank 0 has printed the line
        for name, value in torchrun_variables(rank, 2, 29500).items():
            monkeypatch.setenv(name, value)
        with refused("tools.demo runs in one process, but the environment sets 2; start it once", error):
            run_command("demo", work, ["folder"])
