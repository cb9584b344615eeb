"""The calls of benchmarks/gpu.sh: their order and time, and commands that their programs accept."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import checks
from benchmarks.gpu.calls import CALLS, with_providers
from benchmarks.gpu.parts import Parts, Sizes
from benchmarks.gpu.runner import GRACE_S
from benchmarks.speed import step
from utils.config.parser import parse_config
from utils.config.settings import TrainConfig

pytestmark = pytest.mark.benchmarks
MAX_EXPECTED_S = {"first": 500, "again": 215}  # which leaves time for a slow start


def all_parts() -> Parts:
    return Parts(Sizes(), Path("folder"), "python")


@pytest.mark.parametrize("call", CALLS)
def test_every_call_fits_its_time(call: str):
    """This includes the peer and the data sets, and leaves time for a part that takes longer than expected."""
    parts = all_parts()
    expected_s = sum(part.expected_s for part in with_providers(CALLS[call].choose(parts), parts))
    assert expected_s <= MAX_EXPECTED_S.get(call, 460)
    assert expected_s < CALLS[call].budget_s


def test_the_first_calls_end_in_time_whatever_happens():
    """The last part may have to be killed."""
    for call, seconds in (("first", 540), ("again", 240)):
        assert CALLS[call].budget_s + 2 * GRACE_S < seconds


class Accepted(Exception):
    """The command line has been parsed."""


@pytest.mark.parametrize("call", CALLS)
def test_every_command_is_accepted_by_its_program(call: str, monkeypatch: pytest.MonkeyPatch):
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser, args=None, namespace=None):
        parse_args(parser, args, namespace)
        raise Accepted

    parts = all_parts()
    for part in with_providers(CALLS[call].choose(parts), parts):
        if "train.py" in part.command:
            parse_config(TrainConfig, part.command[part.command.index("train.py") + 1 :])
            continue
        module, *arguments = part.command[2:]
        program = {"benchmarks.gpu.checks": checks, "benchmarks.speed.step": step}[module]
        with monkeypatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
            patch.setattr(sys, "argv", [module, *arguments])
            with pytest.raises(Accepted):
                program.main()
