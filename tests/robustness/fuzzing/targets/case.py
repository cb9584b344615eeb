"""An input of the fuzzer (`Case`), the kinds of files that it changes (`Target`), and helpers for both."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.robustness.fuzzing import inputs
from tests.robustness.fuzzing.inputs import change_bytes
from tests.robustness.fuzzing.world import World
from utils.errors import UserError
from utils.logger import get_logger

MAX_CHARACTERS = 2000  # in a line
REFUSED = "refused in a line"


class Case:
    """One input: its random numbers, an empty folder of its own, the valid files, and what the program has logged."""

    def __init__(self, rng: random.Random, folder: Path, world: World) -> None:
        self.rng = rng
        self.folder = folder
        self.world = world
        self.messages: list[str] = []
        self.files: list[Path | str] = []  # a line may name any of them

    def copy(self, source: Path, name: str = "set") -> Path:
        return shutil.copytree(source, self.folder / name)

    def write(self, path: Path, changed: inputs.Change) -> None:
        """Writes a changed file, which a line may name from now on."""
        data, what = changed
        self.messages.append(f"{path.name}: {what}")
        self.files.append(path)
        path.write_bytes(data)

    def change(
        self,
        path: Path,
        share: float = 0.35,
        others: Sequence[bytes] = (),
        by: Callable[[bytes, random.Random], inputs.Change] | None = None,
    ) -> None:
        """Changes a file: with probability ``share`` its bytes, else its values by ``by``, which follows from its
        suffix if there is such a change."""
        data = path.read_bytes()
        by = by or inputs.BY_SUFFIX.get(path.suffix)
        if by is None or self.rng.random() < share:
            self.write(path, change_bytes(data, self.rng, list(others)))
        else:
            self.write(path, by(data, self.rng))

    def make_odd(self, path: Path, kinds: Sequence[str] = inputs.ODD_KINDS) -> str:
        kind = self.rng.choice([kind for kind in kinds if kind != "unreadable" or os.getuid()])
        self.messages.append(f"{path.name} is {kind}")
        self.files.append(path)
        inputs.make_odd_kind(path, kind)
        return kind

    def check_line(self, error: UserError) -> str:
        """Checks that the line with which the program would end names one of the files, and returns the verdict."""
        line = " ".join(str(error).split())
        assert any(os.path.basename(file) in line for file in self.files), f"names no file: {line[:300]}"
        assert len(line) <= MAX_CHARACTERS, f"a line of {len(line)} characters: {line[:300]}"
        return REFUSED

    def attempt(self, call: Callable[[], Any]) -> Any:
        """Returns the result of ``call``, or REFUSED if it ends in a line that names a file."""
        try:
            return call()
        except UserError as error:
            return self.check_line(error)


@contextlib.contextmanager
def must_work() -> Iterator[None]:
    """Fails if the code ends with a line, which is a finding here."""
    try:
        yield
    except UserError as error:
        raise AssertionError(error) from None


class Target(NamedTuple):
    """A kind of file. ``run`` tries one input and returns a short verdict; it raises any exception for a finding, and
    a UserError where the program would end with its line. ``needs`` is what it uses of the `World`."""

    run: Callable[[Case], str]
    needs: tuple[str, ...] = ()
    weight: float = 1.0  # how often it is tried, relative to the others
    deadline_s: float = 10.0


def captured() -> list[str]:
    """Returns a list that receives the messages that the program logs from now on in this process."""
    messages: list[str] = []
    handler = logging.Handler()
    logger = get_logger()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)
    return messages
