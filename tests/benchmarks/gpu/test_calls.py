"""The calls of benchmarks/gpu.sh: their order and time, and commands that their programs accept."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.parts import BUDGETS_S, Parts, Sizes
from benchmarks.gpu.runner import GRACE_S
from benchmarks.speed import step
from utils.config.parser import parse_config
from utils.config.settings import TrainConfig

pytestmark = pytest.mark.benchmarks
MAX_EXPECTED_S = {"first": 500, "again": 215, "others": 530}  # which leaves time for a slow start
LIMITS_S = {"first": 540, "again": 240, "others": 580}  # what gpu.sh says


@pytest.mark.parametrize("call", BUDGETS_S)
def test_every_call_fits_its_time(call: str):
    """This includes the peer and the data sets. The last part may have to be killed."""
    parts = Parts(Sizes(), Path("folder"), "python")
    expected_s = sum(part.expected_s for part in parts.with_makers(parts.calls[call]))
    assert expected_s <= MAX_EXPECTED_S[call] < BUDGETS_S[call]
    assert BUDGETS_S[call] + 2 * GRACE_S < LIMITS_S[call]


class Accepted(Exception):
    """The command line has been parsed."""


@pytest.mark.parametrize("call", BUDGETS_S)
def test_every_command_is_accepted_by_its_program(call: str, monkeypatch: pytest.MonkeyPatch):
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser, args=None, namespace=None):
        parse_args(parser, args, namespace)
        raise Accepted

    parts = Parts(Sizes(), Path("folder"), "python")
    for part in parts.with_makers(parts.calls[call]):
        words = [str(word) for word in part.command]
        if "train.py" in words:
            parse_config(TrainConfig, words[words.index("train.py") + 1 :])
        elif "benchmarks.gpu.checks" in words:
            name, settings = words[-2:]
            module, function = name.split(".")
            check = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
            inspect.signature(check).bind(**json.loads(settings))
        else:
            assert words[1:3] == ["-m", "benchmarks.speed.step"]
            with monkeypatch.context() as patch:
                patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
                patch.setattr(sys, "argv", words[2:])
                with pytest.raises(Accepted):
                    step.main()
