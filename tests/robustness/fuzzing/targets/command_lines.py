"""Random command lines: refused in a line, or parsed to settings whose own command line has the same meaning."""

from __future__ import annotations

import dataclasses
import random

from tests.robustness.fuzzing.targets.case import REFUSED, Case
from utils.config.commands import COMMANDS
from utils.config.flags import flag_actions, flags_of
from utils.config.parser import parse_config
from utils.errors import UserError

MAX_WORDS = 6
WORDS = (
    *("", "-", "--", "--", "---", "--no-", "-x", "=", "a=b", "a_b", "--a_b", "*", "@", "a.yaml", "demo", "x" * 5000),
    *("-1", "1e9", "nan", "inf", "0x10", "1_0", "0,1", "9" * 30, "true", "None", "null", "\u0661"),
    *("[", "[1]", '["', '["a"]', '["-1"]', '["a", 1]', '["[\\""]', "{}", "\0", "\n", "\ud800", "\u00e9"),
)


def command_lines(case: Case) -> str:
    rng = case.rng
    settings = rng.choice([command.settings for command in COMMANDS.values()])
    flags = ["--", *flag_actions(settings)]
    words = [_word(flags, rng) for _ in range(rng.randint(0, MAX_WORDS))]
    case.messages.append(f"{settings.__name__} {words}")
    try:
        config = parse_config(settings, words)
    except UserError:
        return REFUSED
    if any(field.metadata["positional"] for field in dataclasses.fields(settings)):
        return "parsed"
    assert repr(parse_config(settings, flags_of(config))) == repr(config), flags_of(config)  # repr: nan equals nan
    return "parsed and written again"


def _word(flags: list[str], rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(WORDS)
    flag = rng.choice(flags)
    if rng.random() < 0.1:
        flag = "--" + flag.lstrip("-").replace("-", "_")
    return f"{flag}={rng.choice(WORDS)}" if kind < 0.75 else flag
