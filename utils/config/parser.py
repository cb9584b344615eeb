"""Reads command lines, files of settings and keyword arguments into the dataclasses of `utils.config.settings`.

From words to settings:

    parse_command                 a command line, or a file of settings (settings_file.py)
      aliases.our_flags           flags of other programs are replaced by ours
      flags.given_values          argparse, by the flags that `build_parser` makes of the fields
    given_settings                values by name: of a file, or of keywords (lockstep/keywords.py)
      schema.build
    schema.check                  every value, by the type and the bounds of its field
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from utils.config.aliases import OTHER_FORMATS, is_yolo_line, line_to_type, our_flags
from utils.config.commands import command_of
from utils.config.flags import flag_actions, flag_name, given_values
from utils.config.settings_file import PREFIX, read_settings_file
from utils.errors import Mistakes, UserError, all_mistakes
from utils.schema import DataclassT, build


@dataclass(frozen=True)
class ParsedCommand(Generic[DataclassT]):
    """The settings of a command, and which of them its user has given."""

    config: DataclassT
    explicit_flags: frozenset[str]  # names of the settings that are given


def parse_command(cls: type[DataclassT], argv: Sequence[str] | None) -> ParsedCommand[DataclassT]:
    """Parses a command line, which may use YOLOv5's flags, or a single argument ``@FILE`` (see `settings_file`).
    ``argv`` None means this process's own. Raises UserError that lists the mistakes and what to write instead; only the
    first ones if a word is no value of its flag."""
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) == 1 and argv[0].startswith(PREFIX):
        path = Path(argv[0].removeprefix(PREFIX))
        return given_settings(cls, read_settings_file(path), str(path))
    with all_mistakes() as mistakes:
        words, values, log_lines = _read(cls, argv, mistakes)
    for name in _repeated_fields(cls, words):
        value = values[name]
        shown = " ".join(map(str, value)) if isinstance(value, list) else value
        log_lines.append(f"{flag_name(name)}: given several times; used: {shown}")
    if log_lines:
        from utils.logger import log_when_configured  # imports logging, which --help does not need

        log_when_configured(*log_lines)
    return ParsedCommand(cls(**values), frozenset(values))


def given_settings(cls: type[DataclassT], values: Mapping[str, Any], location: str = "") -> ParsedCommand[DataclassT]:
    """Checks settings that are given as values by name: a `settings_file`, or keyword arguments. Raises UserError that
    lists the mistakes, each with ``location`` ("": none) and the name."""
    return ParsedCommand(build(cls, values, location), frozenset(values))


def parse_config(cls: type[DataclassT], argv: Sequence[str] | None) -> DataclassT:
    """Returns the settings of `parse_command`."""
    return parse_command(cls, argv).config


def _repeated_fields(cls: type, words: Sequence[str]) -> list[str]:
    """Returns the fields that the flags ``words`` set more than once. ``--set`` may be repeated."""
    actions = flag_actions(cls)
    flags = [word.partition("=")[0] for word in words]
    counts = Counter(actions[flag].dest for flag in flags if flag in actions)
    return [name for name, count in counts.items() if count > 1 and name != "override"]


def _read(cls: type, argv: Sequence[str], mistakes: Mistakes) -> tuple[list[str], dict[str, Any], list[str]]:
    """Translates and parses a command line. Returns its words before ``--`` in flags of ``cls``, the values that all
    words set, and log lines."""
    num_flag_words = argv.index("--") if "--" in argv else len(argv)
    words = [_with_dashes(word) for word in argv[:num_flag_words]]
    positional = argv[num_flag_words:]  # from ``--`` on, no word is a flag
    if len(positional) == 1:  # nothing follows ``--``, which argparse would report as unrecognized
        positional = []
    command = command_of(cls).name
    if is_yolo_line(command, words):
        raise UserError(line_to_type(command, words))
    words, log_lines = our_flags(command, words)
    for word in words:
        if command == "export" and word in OTHER_FORMATS:
            raise UserError(f"--format {word}: {OTHER_FORMATS[word]}")
    return words, given_values(cls, [*words, *positional], mistakes), log_lines


def _with_dashes(word: str) -> str:
    """Writes the flag in ``--batch_size=8`` with dashes; returns other words unchanged."""
    if not word.startswith("--"):
        return word
    flag, separator, value = word.partition("=")
    return flag.replace("_", "-") + separator + value
