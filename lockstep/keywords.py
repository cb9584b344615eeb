"""Keyword arguments of the Python API as flags of the commands, and the commands' messages in terms of keywords."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from utils.config.flags import flag_of
from utils.config.other_programs import HYPERPARAMETERS, flags_of, foreign_flags, reason, translated
from utils.config.settings import ExportConfig, TrainConfig, ValConfig
from utils.errors import UserError, has_control_characters, one_line
from utils.files.schema import suggestion

NOT_KEYWORDS = {  # parameters of the functions themselves, and what is not for them
    TrainConfig: ("data", "callbacks", "resume", "override"),
    ValConfig: ("weights", "data"),
    ExportConfig: ("weights",),
}
# Keywords of Ultralytics' train() that are arguments of other names, or functions, here.
_ELSEWHERE = {
    "resume": "call lockstep.resume(RUN)",
    "pretrained": "name the weights to start from with weights",
    "spawn": "write devices",
}


def flags_of_keywords(command: str, keywords: Mapping[str, Any]) -> list[str]:
    """The flags that mean ``keywords``, hyper-parameters among them; None: not given. Prints a line for each keyword of
    other programs that changes nothing, and raises UserError for those that are unknown or have another name."""
    known, flags = flags_of(command), []
    for name, value in keywords.items():
        flag = "--" + name.replace("_", "-")
        action = known.get(flag) or known.get(translated(command, flag)[0])
        is_switch = isinstance(action, argparse.BooleanOptionalAction)
        if value is None:
            continue
        if name in HYPERPARAMETERS and "--set" in known:
            flags.append(f"--set={name}={json.dumps(value, default=float)}")  # JSON is YAML
        elif action is None or name in _ELSEWHERE or (isinstance(value, bool) and not is_switch):
            flags += _of_other_program(command, name, value, is_ours=action is not None)
        elif value not in ([], ()):
            flags += flag_of(name, value)
    return flags


def _of_other_program(command: str, name: str, value: Any, *, is_ours: bool) -> list[str]:
    """The flags that mean a keyword of Ultralytics; those of a keyword ``is_ours`` may be used as they are."""
    if why := _ELSEWHERE.get(name):
        raise UserError(f"{name}={value!r}: {why}")
    try:
        flags = foreign_flags(command, name, str(value))
    except UserError as error:
        known = [flag.removeprefix("--").replace("-", "_") for flag in flags_of(command)]
        why = str(error) or f"unknown{suggestion(name, [*known, *HYPERPARAMETERS])}"
        raise UserError(f"{name}={value!r}: {in_python(command, why)}") from None
    if flags and not is_ours:
        raise UserError(f"{name}={value!r}: write {in_python(command, ' '.join(flags))}")
    if not flags and not is_ours:
        why = reason(command, "--" + name.replace("_", "-"))
        print(f"{name}={value!r}: without effect{f' ({why})' * bool(why)}", flush=True)
    return flags


def in_python(command: str, message: str) -> str:
    """``message`` with keywords in place of the command's flags: ``check=False`` for ``--no-check``."""
    flags = flags_of(command)

    def keyword(match: re.Match[str]) -> str:
        no, name, rest, value = match[1] or "", match[2], match[3] or "", match[4] or ""
        action, key = flags.get(f"--{name}"), name.replace("-", "_")
        if name == "set" and "=" in value:
            return value
        if name == "spawn" and command == "train":
            key = "devices"
        if action is None:
            return match[0]
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"{key}={not no}{rest}"
        if value in (action.choices or ()):
            return f"{key}={value!r}"
        is_value = re.fullmatch(r"-?[\d.]*\d|[A-Z]+", value)
        return f"{key}={value}" if is_value else f"{key}{rest}"

    return re.sub(r"(?<![\w-])--(no-)?([a-z][a-z0-9-]*)([ =]([\w.=-]*[\w]))?", keyword, message)


def path_text(name: str, path: Any) -> str:
    """``path`` as text. Raises UserError that names the argument if it is not a path."""
    try:
        return os.fspath(path)
    except TypeError:
        raise UserError(f"{name}: must be a path, got {path!r}") from None


def check_text(*flags: str) -> None:
    """Raises UserError for a flag that no process can be started with, or that lines of its log cannot name."""
    for flag in flags:
        try:
            os.fsencode(flag)
            is_wrong = has_control_characters(flag)
        except UnicodeEncodeError:
            is_wrong = True
        if is_wrong:
            raise UserError(f"{one_line(flag)}: contains a control character or an unpaired surrogate: {flag[:80]!r}")
