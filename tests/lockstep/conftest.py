"""Fixtures of the tests of the Python package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.commands import start
from tests.helpers.tiny import write_dataset, write_model
from utils.config.parser import ParsedCommand
from utils.config.settings import TrainConfig, ValConfig, changed_settings
from utils.process.child import write_result


@pytest.fixture(autouse=True)
def _preloaded(preloaded: None) -> None:
    """The processes that the package starts begin with torch imported."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A small data set; the model tiny.yaml is beside its folder."""
    write_model(tmp_path / "tiny.yaml")
    return write_dataset(tmp_path / "set", train=6, val=2)


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Returns a function that replaces training and validation: it calls ``work``, and reports the folder ``a``. It
    returns the list to which the settings of each call are appended."""

    def replace(work: Callable[[], object] = lambda: None) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def train(command: ParsedCommand[TrainConfig]) -> None:
            calls.append({name: getattr(command.config, name) for name in command.explicit_flags})
            work()
            write_result(folder="a")

        def validate(config: ValConfig) -> None:
            calls.append(changed_settings(config))
            work()
            write_result(folder="a")

        monkeypatch.setattr(start, "train", train)
        monkeypatch.setattr(start, "validate", validate)
        return calls

    return replace
