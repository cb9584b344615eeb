"""Keyword arguments of the Python API as flags of the commands."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from utils.config.flags import flag_of
from utils.config.other_programs import HYPERPARAMETERS, flags_of, foreign_flags, reason
from utils.config.settings import ExportConfig, TrainConfig, ValConfig
from utils.errors import UserError
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
    Ultralytics that changes nothing, and raises UserError for those that are unknown or have another name."""
    known, flags = flags_of(command), []
    for name, value in keywords.items():
        flag = "--" + name.replace("_", "-")
        is_switch = isinstance(known.get(flag), argparse.BooleanOptionalAction)
        if value is None:
            continue
        if why := _ELSEWHERE.get(name):
            raise UserError(f"{name}={value!r}: {why}")
        if name in HYPERPARAMETERS and "--set" in known:
            flags.append(f"--set={name}={json.dumps(value, default=float)}")  # JSON is YAML
        elif flag not in known or (isinstance(value, bool) and not is_switch):
            flags += _of_ultralytics(command, name, value)
        elif value not in ([], ()):
            flags += flag_of(name, value)
    return flags


def _of_ultralytics(command: str, name: str, value: Any) -> list[str]:
    try:
        flags = foreign_flags(command, name, str(value))
    except UserError as error:
        known = [flag.removeprefix("--").replace("-", "_") for flag in flags_of(command)]
        why = str(error) or f"unknown{suggestion(name, [*known, *HYPERPARAMETERS])}"
        raise UserError(f"{name}={value!r}: {why}") from None
    if not flags and (why := reason(command, "--" + name.replace("_", "-"))):
        print(f"{name}={value!r}: without effect ({why})", flush=True)
    return flags
