"""Settings from flags, YAML files and stored mappings, checked against the dataclasses of `utils.config.settings`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, TypeVar

import yaml

from utils.config.settings import Hyperparameters
from utils.config.yaml_files import load_yaml, parse_yaml, suggestion
from utils.config.yolo_flags import advice, translated
from utils.errors import UserError
from utils.files.folders import CONFIGS

T = TypeVar("T")


def _type_of(field: dataclasses.Field, owner: type) -> tuple[type, bool]:
    """The plain type of a field (list element types dropped to list) and whether None is allowed."""
    hint = typing.get_type_hints(owner)[field.name]
    if isinstance(hint, types.UnionType):
        inner = [a for a in typing.get_args(hint) if a is not type(None)]
        return inner[0], True
    return hint, False


def _check(value: Any, field: dataclasses.Field, owner: type, where: str) -> Any:
    """``value`` as the field's type, or a UserError that begins with ``where``."""
    kind, optional = _type_of(field, owner)
    if value is None and optional:
        return None
    origin = typing.get_origin(kind) or kind
    if origin is float and isinstance(value, int | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):  # YAML 1.1 reads "1e-3" as text
            value = float(value)
    if not isinstance(value, origin) or (origin in (int, float) and isinstance(value, bool)):
        raise UserError(f"{where}: wants {getattr(origin, '__name__', origin)}, got {value!r}")
    if origin is float and math.isinf(value):
        raise UserError(f"{where}: wants a finite number, got {value!r}")
    meta = field.metadata
    if meta["choices"] and value not in meta["choices"]:
        raise UserError(f"{where}: wants one of {', '.join(meta['choices'])}, got {value!r}")
    if value == meta["also"]:
        return value
    if meta["low"] is not None and not value >= meta["low"]:
        instead = "" if meta["also"] is None else f" or {meta['also']}"
        raise UserError(f"{where}: wants at least {meta['low']}{instead}, got {value!r}")
    if meta["high"] is not None and not value <= meta["high"]:
        raise UserError(f"{where}: wants at most {meta['high']}, got {value!r}")
    return value


def from_mapping(cls: type[T], values: Any, where: str) -> T:
    """A checked config from a mapping; unknown keys and wrong types raise UserError naming ``where``."""
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise UserError(f"{where}: wants 'key: value' lines, got {type(values).__name__}")
    known = {f.name: f for f in dataclasses.fields(cls)}
    values = _renamed(cls, values, where)
    for key in values:
        if key not in known:
            raise UserError(f"{where}: unknown key '{key}'{suggestion(str(key), known)}")
    return cls(**{k: _check(v, known[k], cls, f"{where}: {k}") for k, v in values.items()})


def _renamed(cls: type, values: dict[Any, Any], where: str) -> dict[Any, Any]:
    """``values`` with former names of fields (`settings.setting`) replaced by the current ones."""
    current = {old: f.name for f in dataclasses.fields(cls) for old in f.metadata.get("formerly", ())}
    for old, new in current.items():
        if old in values and new in values:
            raise UserError(f"{where}: '{old}' is the former name of '{new}', which is there too; remove one")
    return {current.get(key, key): value for key, value in values.items()}


def hyperparameters_from(path: str, overrides: typing.Sequence[str] = ()) -> Hyperparameters:
    """Defaults, then the YAML at ``path`` (if any), then ``key=value`` overrides, each value read as YAML."""
    values = (load_yaml(path) if path else {}) or {}
    return with_overrides(from_mapping(Hyperparameters, values, path or "hyper-parameters"), overrides)


def with_overrides(hyp: Hyperparameters, overrides: typing.Sequence[str]) -> Hyperparameters:
    """``hyp`` with ``key=value`` on top, each value read as YAML."""
    changed = {}
    for item in overrides:
        key, separator, text = item.partition("=")
        if not separator:
            raise UserError(f"--set {item}: wants key=value")
        try:
            changed[key.strip()] = parse_yaml(text)
        except yaml.YAMLError:
            raise UserError(f"--set {item}: the value is malformed YAML") from None
        except RecursionError:
            raise UserError(f"--set {key}: the value is nested too deeply") from None
    changed = _renamed(Hyperparameters, changed, "--set")
    checked = from_mapping(Hyperparameters, changed, "--set")
    return dataclasses.replace(hyp, **{k: getattr(checked, k) for k in changed})


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors and exit code 2, suggestions for misspelt flags, ``_`` as good as ``-`` in them.
    ``script``: whose flags these are, as `utils.config.yolo_flags` names it."""

    def __init__(self, *, script: str, **options: Any) -> None:
        super().__init__(**options)
        self._script = script

    def parse_known_args(self, args=None, namespace=None):
        given = [_dashed(a) for a in (sys.argv[1:] if args is None else args)]
        given = translated(self._script, given)
        hyperparameters = {f.name for f in dataclasses.fields(Hyperparameters)}
        if line := advice(self._script, given, self._option_string_actions, hyperparameters):
            self.error(line)
        return super().parse_known_args(given, namespace)

    def error(self, message: str) -> typing.NoReturn:
        if message.startswith("unrecognized arguments: "):
            flag = message.split(": ", 1)[1].split()[0].split("=")[0]
            message += suggestion(flag, self._option_string_actions)
        self.exit(2, f"error: {message}\n")


def _dashed(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    flag, separator, value = argument.partition("=")
    return flag.replace("_", "-") + separator + value


def build_parser(cls: type, description: str) -> argparse.ArgumentParser:
    """A parser with one flag a field: ``--batch-size`` and ``--batch_size`` both work; booleans take --x and --no-x."""
    parser = _Parser(
        script=cls.__name__.removesuffix("Config").lower(),
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    for field in dataclasses.fields(cls):
        kind, _ = _type_of(field, cls)
        origin = typing.get_origin(kind) or kind
        meta = field.metadata
        names = ["--" + field.name.replace("_", "-"), *meta["aliases"]]
        required = field.default is MISSING and field.default_factory is MISSING
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        options: dict[str, Any] = {"dest": field.name, "help": meta["help"]}
        options |= {"required": True} if required else {"default": default}
        if origin is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif origin is list:
            element = (typing.get_args(kind) or (str,))[0]
            options |= {"nargs": "+", "type": element}
            if field.name == "override":
                options |= {"action": "extend", "metavar": "KEY=VALUE"}
        else:
            options |= {"type": origin, "choices": meta["choices"]}
            if meta["bare"] is not None:
                options |= {"nargs": "?", "const": meta["bare"]}
        parser.add_argument(*names, **options)
    return parser


def parse_config(cls: type[T], argv: typing.Sequence[str] | None, description: str) -> T:
    """Command line to checked config. Raises UserError for values out of range; argparse exits for misspelt flags."""
    values = vars(build_parser(cls, description).parse_args(argv))
    known = {f.name: f for f in dataclasses.fields(cls)}
    return cls(**{k: _check(v, known[k], cls, "--" + k.replace("_", "-")) for k, v in values.items()})


def given_flags(cls: type, argv: typing.Sequence[str] | None) -> set[str]:
    """Names of the fields that the command line sets, as against those left at their defaults."""
    parser = build_parser(cls, "")
    for action in parser._actions:
        action.default, action.required = argparse.SUPPRESS, False
    return set(vars(parser.parse_args(argv)))


def to_dict(config: Any) -> dict[str, Any]:
    """Plain data (for YAML and checkpoints), lists copied."""
    return dataclasses.asdict(config)


FOLDER = CONFIGS / "hyp"


def recipe_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_recipe(hyp: str, overrides: Sequence[str] = (), *, pretrained: bool) -> Hyperparameters:
    """What ``--hyp`` means, with ``key=value`` overrides on top.

    Args:
        hyp: "auto", a recipe's name, or a YAML file.
        pretrained: the run starts from weights. For "auto" that decides; the optimiser is chosen by the number of steps
            (`engine.optim.build.choose_optimizer`), since that is known once the data is.

    Raises UserError for what is neither a recipe nor a file.
    """
    if hyp == "auto":
        hyp = "finetune" if pretrained else "scratch"
    if hyp in recipe_names():
        return hyperparameters_from(str(FOLDER / f"{hyp}.yaml"), overrides)
    if not Path(hyp).suffix and not Path(hyp).exists():
        known = ", ".join(["auto", *recipe_names()])
        raise UserError(f"--hyp {hyp}: no such recipe or file{suggestion(hyp, recipe_names())}; known: {known}")
    return hyperparameters_from(hyp, overrides)
