"""What command lines, hyper-parameter files and Python of YOLOv5 and Ultralytics mean here, by
configs/other_programs.yaml.

Commands are named as their settings are: "train" for `settings.TrainConfig`.
"""

from __future__ import annotations

import argparse
import functools
import re
import shlex
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import yaml

from utils.config.flags import flag_actions, given_values, whole_number
from utils.config.search_settings import KfoldConfig, SearchConfig
from utils.config.settings import DetectConfig, ExportConfig, Hyperparameters, TrainConfig, ValConfig
from utils.config.yaml_files import parse_override
from utils.errors import Mistakes, UserError, all_mistakes
from utils.files.folders import CONFIGS
from utils.files.schema import build, suggestion

_IS_FLAG = re.compile(r"-[^\d.]").match  # negative numbers are not flags
_CONFIGS: dict[str, type] = {
    **{"train": TrainConfig, "val": ValConfig, "detect": DetectConfig, "export": ExportConfig},
    **{"kfold": KfoldConfig, "search": SearchConfig},
}
HYPERPARAMETERS = tuple(field.name for field in fields(Hyperparameters))


@functools.cache
def _table() -> dict[str, Any]:
    text = (CONFIGS / "other_programs.yaml").read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def flags_of(command: str) -> dict[str, argparse.Action]:
    return flag_actions(_CONFIGS[command])


def tables(command: str) -> dict[str, dict]:
    """What is known of a command: flags, values, without_effect, refused and refused_values."""
    return _table()["commands"][command]


def translated(command: str, flag: str) -> list[str]:
    """The words that mean a flag of another program, ``flag`` itself if it is not known."""
    ours = tables(command)["flags"].get(flag)
    return ours.split() if ours else [flag]


def rewritten(command: str, arguments: Sequence[str], mistakes: Mistakes) -> tuple[list[str], list[str]]:
    """The command line in our flags, and a line for the log about each flag that was left out as it changes nothing.
    Flags and values that the command does not have are noted, with what to write instead, and left out.
    """
    table, flags, lines, kept = tables(command), flags_of(command), list[str](), list[str]()
    groups = [[""]]  # each a flag and what follows it
    for argument in arguments:
        flag, separator, value = argument.partition("=")
        *others, last = translated(command, flag)
        groups += [[]] if _IS_FLAG(argument) else []
        groups[-1] += [*others, last + separator + value]
    for word, *following in groups:
        flag, separator, value = word.partition("=")
        values = [value] * bool(separator) + following
        key = _synonym(flag.removeprefix("--").replace("-", "_"))
        reasons = table["refused_values"].get(flag, {})
        if why := table["without_effect"].get(flag):
            lines.append(f"{flag}: {why}")
            kept += values[bool(separator) or flag in _table()["with_value"] :]
            continue
        is_hyperparameter = flag.startswith("--") and "--set" in flags and key in HYPERPARAMETERS
        listed = _flags_of_value(command, key, values[0]) if values else None
        if flag not in flags and listed:
            kept += listed
        elif flag not in flags and flag in table["refused"]:
            mistakes.add(f"{flag}: {table['refused'][flag]}")
        elif flag not in flags and is_hyperparameter:
            shown = shlex.quote(f"{key}={values[0] if values else 'VALUE'}")
            mistakes.add(f"{flag}: is a hyper-parameter; write --set {shown}")
        elif found := [f"{value}: {reasons[value]}" for value in values if value in reasons]:
            mistakes.add(f"{flag} {'; '.join(found)}")
        else:
            kept += [word, *following]
    return kept[1:], lines


def _synonym(key: str) -> str:
    return _table()["synonyms"].get(key, key)


def reason(command: str, flag: str) -> str:
    """Why ``command`` has no ``flag``; "" if that is not known."""
    return (tables(command)["refused"] | tables(command)["without_effect"]).get(flag, "")


def python_hint(kind: str, name: str) -> str:
    """What to write instead of ``name``, which programs for YOLOv5 and Ultralytics use; "" if it is not known.
    ``kind``: "package", "model", "result" or "argument"."""
    return _table()["python"][kind].get(name, "")


def other_task(weights: str) -> str:
    """Says that weights such as ``yolov8n-seg.pt`` are not of a detector; "" for other names."""
    match = re.fullmatch(r"(yolo\w+)-(seg|pose|obb|cls)(\.pt|\.ya?ml)?", weights)
    why = _table()["other_tasks"][_table()["endings"][match[2]]] if match else ""
    return f"{weights}: {why}; use {match[1]}{match[3] or ''}" if match else ""


def unknown_hyperparameter(key: str) -> str:
    """Says what ``key`` is instead of a hyper-parameter."""
    flag = "--" + key.replace("_", "-")
    ours = translated("train", flag)[0]
    if _synonym(key) != key:
        return f"unknown key '{key}' (did you mean '{_synonym(key)}'?)"
    if ours in flags_of("train"):
        return f"'{key}': is a flag, not a hyper-parameter; give it as {ours}"
    _, why = _table()["of_yolov5"].get(key, ("", reason("train", flag)))
    return f"'{key}': {why}; remove it" if why else f"unknown key '{key}'{suggestion(key, HYPERPARAMETERS)}"


def recipe(values: dict[Any, Any], where: str) -> tuple[dict[Any, Any], list[str]]:
    """The hyper-parameters among ``values`` of the YAML file ``where``, and the lines without effect here. Raises
    UserError that names all other lines, with reasons."""
    table, texts = _table(), {key: str(value) for key, value in values.items()}
    of_yolov5 = table["of_yolov5"] if values.keys() & table["signs_of_yolov5"] else {}
    kept, unused, mistakes = dict[Any, Any](), list[str](), list[str]()
    for key, text in texts.items():
        off, why = of_yolov5.get(key, ("", ""))
        if key in HYPERPARAMETERS and not off:
            kept[key] = values[key]
        elif re.fullmatch(off, _plain(text)) if off else not _has_effect(str(key), text):
            unused.append(f"{key} {text[:40]}" + f" ({why})" * bool(why))
        else:
            mistakes.append(f"'{key}': {why}; remove it" if off else unknown_hyperparameter(str(key)))
    if mistakes:
        raise UserError(f"{where}: {'; '.join(mistakes)}")
    return kept, unused


def _has_effect(key: str, text: str) -> bool:
    try:
        with all_mistakes() as mistakes:
            flags, _ = rewritten("train", foreign_flags("train", key, text), mistakes)
            values = given_values(TrainConfig, flags, mistakes)
        hyp = build(Hyperparameters, dict(map(parse_override, values.pop("override", ()))), "--set")
    except UserError:
        return True
    return (TrainConfig(**values), hyp) != (TrainConfig(), Hyperparameters())


def foreign_flags(command: str, key: str, value: str) -> list[str]:
    """Flags with the effect of ``key=value``; empty if none is needed. Raises UserError (why) if none exist."""
    table, plain, flag, hyperparameter = _table(), _plain(value), "--" + key.replace("_", "-"), _synonym(key)
    listed = _flags_of_value(command, key, value)
    if listed is not None:
        return listed
    name, *fixed = translated(command, flag)
    action = None if key in table["other_meaning"] else flags_of(command).get(name)
    is_set = "--set" in flags_of(command) and hyperparameter in HYPERPARAMETERS
    if (plain == "none" and (is_set or action)) or (plain == "true" and key in table["when_true"]):
        return []
    if len(value.splitlines()) != 1:
        raise UserError("its value is empty or has several lines")
    if is_set:
        return ["--set", f"{hyperparameter}={value}"]
    if action is None:
        is_off = plain in ("false", "none") and key in table["when_false"]
        if is_off or (plain == "true" and flag in tables(command)["without_effect"]):
            return []
        raise UserError(table["other_meaning"].get(key) or reason(command, flag))
    is_switch = isinstance(action, argparse.BooleanOptionalAction)
    if (fixed or action.nargs == "?" or is_switch) and plain in ("true", "false"):
        off = [f"--no-{name[2:]}"] if is_switch and action.default is not False else []
        return [name, *fixed] if plain == "true" else off
    if why := tables(command)["refused_values"].get(name, {}).get(plain):
        raise UserError(why)
    first, *more = _words(value, action)
    return [f"{name}={first}", *more] if first.startswith("-") else [name, first, *more]


def _flags_of_value(command: str, key: str, value: str) -> list[str] | None:
    """The flags that mean ``key=value``; None if the table does not list the value."""
    for pattern, flags in tables(command)["values"].get(key, {}).items():
        if re.fullmatch(pattern, _plain(value)):
            return flags.replace("{}", value).split()
    return None


def _words(value: str, action: argparse.Action) -> list[str]:
    """A value, or those of a list such as ``[0, 1]``, as words after a flag: one word unless the flag takes several."""
    is_several = action.nargs == "+" and (action.type is whole_number or (action.dest == "classes" and "," in value))
    if value[:1] not in ("[", "(") and not is_several:
        return [next((choice for choice in action.choices or () if choice.lower() == value.lower()), value)]
    words = [word.strip("'\"") for word in re.split(r"[,\s]+", value.strip("[]() "))]
    if action.dest == "freeze" and len(words) == 1 and words[0] != value:
        return words * 2  # [3] is one layer, but a number alone means all layers before it
    if action.nargs == "+":
        return words
    return [max(words, key=lambda word: (len(word), word))] if action.dest == "imgsz" else [",".join(words)]


def _plain(value: str) -> str:
    """In lower case, numbers in one way of writing, empty lists as none."""
    try:
        return str(float(value)).removesuffix(".0")
    except ValueError:
        return "none" if value in ("[]", "()") else value.lower()
