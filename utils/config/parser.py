"""Builds the dataclasses of `utils.config.settings` from flags, YAML files and stored mappings, with checks."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from utils.config.settings import (
    TOPICS,
    DetectConfig,
    ExportConfig,
    Hyperparameters,
    TrainConfig,
    ValConfig,
    changed_settings,
    default_of,
)
from utils.config.yaml_files import TOO_LONG, fits_64_bits, load_yaml, parse_yaml, suggestion
from utils.errors import UserError, one_line
from utils.files.folders import CONFIGS
from utils.program import COMMANDS

if TYPE_CHECKING:
    from utils.config.other_programs import Program

T = TypeVar("T")


def _command_name(config: type) -> str:
    """ "train" for `TrainConfig`."""
    return config.__name__.removesuffix("Config").lower()


_HYPERPARAMETERS = {f.name: f for f in dataclasses.fields(Hyperparameters)}
_type_hints = functools.cache(typing.get_type_hints)  # takes milliseconds


def _others() -> ModuleType:
    """What command lines and files of YOLOv5 and Ultralytics mean. Most runs have none, and do not import it."""
    from utils.config import other_programs

    return other_programs


def type_of(field: dataclasses.Field, owner: type) -> tuple[type, bool]:
    """The type of a field without ``| None``, and whether None is allowed."""
    hint = _type_hints(owner)[field.name]
    return (typing.get_args(hint)[0], True) if isinstance(hint, types.UnionType) else (hint, False)


def _check(value: Any, field: dataclasses.Field, owner: type, where: str) -> Any:
    """Returns ``value`` converted to the field's type. Raises a UserError that begins with ``where``."""
    kind, optional = type_of(field, owner)
    if value is None and optional:
        return None
    origin = typing.get_origin(kind) or kind
    if origin is float and isinstance(value, int | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):  # YAML 1.1 reads "1e-3" as text
            value = float(value)
    if not isinstance(value, origin) or (origin in (int, float) and isinstance(value, bool)):
        or_null = " or null" if optional else ""
        raise UserError(f"{where}: must be {getattr(origin, '__name__', origin)}{or_null}, got {value!r}")
    if origin is float and math.isinf(value):
        raise UserError(f"{where}: must be a finite number, got {value!r}")
    if any(isinstance(v, int) and not fits_64_bits(v) for v in (value if origin is list else [value])):
        raise UserError(f"{where}: {TOO_LONG}")
    if field.name in ("project", "name") and one_line(value) != value:  # a line of the log names the folder
        raise UserError(f"{where}: {value!r} contains a control character or is not UTF-8; choose another name")
    meta = field.metadata
    wrong = [v for v in (value if origin is list else [value]) if meta["choices"] and v not in meta["choices"]]
    if wrong:
        raise UserError(f"{where}: must be one of {', '.join(meta['choices'])}, got {wrong[0]!r}")
    if value == meta["also"]:
        return value
    if meta["low"] is not None and not value >= meta["low"]:
        instead = "" if meta["also"] is None else f" or {meta['also']}"
        raise UserError(f"{where}: must be at least {meta['low']}{instead}, got {value!r}")
    if meta["high"] is not None and not value <= meta["high"]:
        raise UserError(f"{where}: must be at most {meta['high']}, got {value!r}")
    return value


def from_mapping(cls: type[T], values: Any, where: str) -> T:
    """Builds a config from a mapping (None: empty). Unknown keys and wrong types raise UserError naming ``where``."""
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise UserError(f"{where}: must be 'key: value' lines, got {type(values).__name__}")
    known = {f.name: f for f in dataclasses.fields(cls)}
    for key in values:
        if key not in known:
            raise UserError(f"{where}: {unknown_key(cls, str(key))}")
    return cls(**{k: _check(v, known[k], cls, f"{where}: {k}") for k, v in values.items()})


def unknown_key(cls: type, key: str) -> str:
    """Says what to do about a key that is not a field of ``cls``."""
    if cls is Hyperparameters:
        return _others().unknown_hyperparameter(key, program_of("train"))
    return f"unknown key '{key}'{suggestion(key, [f.name for f in dataclasses.fields(cls)])}"


def hyperparameters_from(
    path: str,
    overrides: Sequence[str] = (),
    lines: list[str] | None = None,
    *,
    base: Hyperparameters | None = None,
) -> Hyperparameters:
    """Reads the YAML at ``path`` ("": no values) and applies `with_overrides`.

    Args:
        lines: receives a line for the log that names what has no effect.
        base: the values of what the file leaves out; None: the defaults.
    """
    values = load_yaml(path) if path else {}
    if isinstance(values, dict) and not values.keys() <= _HYPERPARAMETERS.keys():
        values, unused = _others().recipe(values, path, program_of)
        if unused and lines is not None:
            lines.append(f"{path}: without effect here: {', '.join(unused)}")
    return with_overrides(_changed(base or Hyperparameters(), values, path or "hyper-parameters"), overrides)


def with_overrides(hyp: Hyperparameters, overrides: Sequence[str]) -> Hyperparameters:
    """Returns ``hyp`` with each ``key=value`` of ``overrides`` replaced; values are parsed as YAML."""
    changed = {}
    for item in overrides:
        key, separator, text = item.partition("=")
        if not separator:
            raise UserError(f"--set {item}: must be key=value")
        try:
            changed[key.strip()] = parse_yaml(text)
        except (yaml.YAMLError, UnicodeEncodeError) as error:
            raise UserError(f"--set {item}: {getattr(error, 'problem', None) or 'malformed YAML'}") from None
        except RecursionError:
            raise UserError(f"--set {key}: the value is nested too deeply") from None
    return _changed(hyp, changed, "--set")


def _changed(hyp: Hyperparameters, values: Any, where: str) -> Hyperparameters:
    """``hyp`` with the checked ``values``, whose mistakes are reported as of ``where``."""
    checked = from_mapping(Hyperparameters, values, where)
    return dataclasses.replace(hyp, **{k: getattr(checked, k) for k in values or ()})


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser with one-line errors and suggestions for misspelled flags, which accepts ``_`` for ``-``.

    Args:
        script: the settings' name, such as "train", for `utils.config.other_programs`.
    """

    def __init__(self, *, script: str, **options: Any) -> None:
        super().__init__(**options)
        self._script = script
        self._given, self._is_rewritten = list[str](), False
        self.lines: list[str] = []  # for the log

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self._given = [_dashed(a) for a in (sys.argv[1:] if args is None else args)]
        self._is_rewritten = not self._has_all_flags() and self._script in _configs()
        if self._is_rewritten:
            values, rest = _others().yolo_arguments(self._given)
            if values:
                self.error(_others().command_line(self._script, values, rest, program_of))
            try:
                self._given, self.lines = self._rewritten()
            except UserError as error:
                self.error(str(error))
        return super().parse_known_args(self._given, namespace)

    def _has_all_flags(self) -> bool:
        """Whether all flags of the command line are ours, and nothing comes before them."""
        flags = [word.partition("=")[0] for word in self._given if word.startswith("--")]
        starts = not self._given[:1] or self._given[0].startswith("-")
        return starts and all(flag in self._option_string_actions for flag in flags)

    def _rewritten(self) -> tuple[list[str], list[str]]:
        return _others().rewritten(self._script, self._given, self._option_string_actions, _HYPERPARAMETERS)

    def error(self, message: str) -> typing.NoReturn:
        if not self._is_rewritten and self._script in _configs():
            try:
                self._rewritten()  # a value of a flag of ours may be one of another program
            except UserError as error:
                message = str(error)
        if message.startswith("unrecognized arguments: "):
            flag = message.split(": ", 1)[1].split()[0].split("=")[0]
            message += suggestion(flag, self._option_string_actions)
        self.exit(2, f"error: {one_line(message)}\n")


def _dashed(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    flag, separator, value = argument.partition("=")
    return flag.replace("_", "-") + separator + value


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Defaults that say nothing are left out: most help texts say what an empty value means."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, "", []) else super()._get_help_string(action)


def build_parser(cls: type, description: str) -> _Parser:
    """A parser with one flag per field, written with ``-`` or ``_``; booleans have ``--x`` and ``--no-x``."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    required = [field for field in fields.values() if default_of(field) is MISSING]
    parser = _Parser(
        script=_command_name(cls),
        prog=COMMANDS[_command_name(cls)].typed,
        description=description,
        usage=" ".join(["%(prog)s", *map(_usage, required), "[flags]"]),
        formatter_class=_Help,
        allow_abbrev=False,
    )
    for topic, names in TOPICS.items():
        if shown := [fields[name] for name in names.split() if name in fields]:
            group = parser.add_argument_group(topic)
            for field in shown:
                _add_flag(group, field, cls)
    return parser


def _usage(field: dataclasses.Field) -> str:
    name = field.name.upper()
    return f"{name} ..." if field.metadata["positional"] else f"--{field.name} {name}"


def _add_flag(group: argparse._ArgumentGroup, field: dataclasses.Field, owner: type) -> None:
    kind, _ = type_of(field, owner)
    origin = typing.get_origin(kind) or kind
    meta = field.metadata
    default = default_of(field)
    options: dict[str, Any] = {"dest": field.name, "help": meta["help"]}
    options |= {"required": True} if default is MISSING else {"default": default}
    if origin is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif origin is list:
        element = (typing.get_args(kind) or (str,))[0]
        options |= {"nargs": "+", "type": element, "choices": meta["choices"]}
        if field.name == "override":
            options |= {"action": "extend", "metavar": "KEY=VALUE"}
    else:
        options |= {"type": origin, "choices": meta["choices"]}
        if meta["bare"] is not None:
            options |= {"nargs": "?", "const": meta["bare"]}
    if meta["positional"]:
        group.add_argument(field.name, help=meta["help"], nargs=options["nargs"], type=options["type"])
    else:
        group.add_argument("--" + field.name.replace("_", "-"), *meta["aliases"], **options)


def parse_config(cls: type[T], argv: Sequence[str] | None, description: str) -> T:
    """Parses a command line. Raises UserError for values out of range; argparse exits for unknown flags."""
    parser = build_parser(cls, description)
    values = vars(parser.parse_args(argv))
    if parser.lines:
        from utils.logger import log_when_configured  # with logging, which --help does without

        log_when_configured(*parser.lines)
    known = {f.name: f for f in dataclasses.fields(cls)}
    return cls(**{k: _check(v, known[k], cls, "--" + k.replace("_", "-")) for k, v in values.items()})


def errors_name_typed_flags(cls: type) -> Callable[[Callable], Callable]:
    """Decorates a ``main(argv)``: its UserErrors name the flags of ``cls`` as they were typed (``--img``)."""

    def decorated(main: Callable) -> Callable:
        @functools.wraps(main)
        def run(argv: Sequence[str] | None = None) -> None:
            try:
                main(argv)
            except UserError as error:
                error.args = (_as_typed(str(error), cls, sys.argv[1:] if argv is None else argv),)
                raise

        return run

    return decorated


def _as_typed(message: str, cls: type, argv: Sequence[str]) -> str:
    fields = {f"--{f.name.replace('_', '-')}": f for f in dataclasses.fields(cls)}
    ours = {alias: flag for flag, field in fields.items() for alias in field.metadata["aliases"]}
    for flag in (_dashed(argument).partition("=")[0] for argument in argv if argument.startswith("--")):
        canonical = ours.get(flag, flag)
        if canonical == flag and flag not in fields and _command_name(cls) in _configs():
            canonical = " ".join(_others().translated(_command_name(cls), flag))
        if canonical != flag:
            message = re.sub(rf"(?<![\w-]){re.escape(canonical)}(?![\w-])", flag, message)
    return message


def flags_of(config: Any) -> list[str]:
    """The command line that `parse_config` turns into ``config``."""
    return [word for name, value in changed_settings(config).items() for word in flag_of(name, value)]


def flag_of(name: str, value: Any) -> list[str]:
    """The words of a command line that set the field ``name``."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, list | tuple):
        return [flag, *map(str, value)]
    return [f"{flag}={value}"]


def given_flags(cls: type, argv: Sequence[str] | None) -> set[str]:
    """The names of the fields that the command line sets explicitly."""
    return set(_given(cls, argv))


def _given(cls: type, argv: Sequence[str] | None) -> dict[str, Any]:
    """The values of the fields that the command line sets explicitly. Raises UserError for mistakes; no flag is
    required."""
    known = {f.name: f for f in dataclasses.fields(cls)}
    values = vars(_explicit_parser(cls).parse_args(argv))
    return {k: _check(v, known[k], cls, "--" + k.replace("_", "-")) for k, v in values.items()}


@functools.cache
def _explicit_parser(cls: type) -> argparse.ArgumentParser:
    parser = build_parser(cls, "")
    for action in parser._actions:
        action.default, action.required = argparse.SUPPRESS, False
    parser.error = _raise
    return parser


def _raise(message: str) -> typing.NoReturn:
    raise UserError(message)


@functools.cache
def _configs() -> dict[str, type]:
    """The settings of the commands that other programs have too, by the names of ours."""
    from utils.config.search_settings import KfoldConfig, SearchConfig

    configs = (TrainConfig, ValConfig, DetectConfig, ExportConfig, KfoldConfig, SearchConfig)
    return {_command_name(cls): cls for cls in configs}


@functools.cache
def program_of(script: str) -> Program:
    """The command line of a script."""
    cls = _configs()[script]
    flags = {name: a for name, a in build_parser(cls, "")._option_string_actions.items() if a.dest != "help"}
    return _others().Program(flags, _HYPERPARAMETERS, functools.partial(_changes, cls))


def _changes(cls: type, argv: Sequence[str]) -> dict[str, Any]:
    """The fields that the command line sets to other values than the defaults, hyper-parameters among them."""
    values, defaults = _given(cls, argv), {f.name: f.default for f in dataclasses.fields(cls)}
    overrides = with_overrides(Hyperparameters(), values.pop("override", ()))
    changed = {k: v for k, v in values.items() if v != defaults[k]}
    return changed | ({} if overrides == Hyperparameters() else {"override": overrides})


def read_recipe(
    hyp: str,
    overrides: Sequence[str] = (),
    *,
    pretrained: bool,
    keep_old: bool = False,
    lines: list[str] | None = None,
) -> Hyperparameters:
    """Reads the hyper-parameters that ``--hyp`` names, and applies ``key=value`` overrides.

    Args:
        hyp: "auto", the name of a recipe in configs/hyp, or a YAML file; what a file leaves out is as with "auto".
        pretrained, keep_old: whether the run starts from weights, and keeps their classes, which decides what "auto"
            means. (The optimizer is chosen later, by the number of steps: `engine.optim.build.choose_optimizer`.)
        lines: as in `hyperparameters_from`.

    Raises UserError if ``hyp`` is neither a recipe nor a file.
    """
    usual = "keep_old" if keep_old else "finetune" if pretrained else "scratch"
    hyp = usual if hyp == "auto" else hyp
    recipes = {path.stem: path for path in sorted((CONFIGS / "hyp").glob("*.yaml"))}
    if hyp in recipes:
        return hyperparameters_from(str(recipes[hyp]), overrides)
    if not Path(hyp).suffix and not Path(hyp).exists():
        known = ", ".join(["auto", *recipes])
        raise UserError(f"--hyp {hyp}: no such recipe or file{suggestion(hyp, recipes)}; known: {known}")
    return hyperparameters_from(hyp, overrides, lines, base=hyperparameters_from(str(recipes[usual])))
