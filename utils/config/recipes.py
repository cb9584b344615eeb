"""Reads recipes: hyper-parameter files and ``--set``."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Sequence
from typing import Any

from utils.config.flags import flag_name
from utils.config.settings import HYPERPARAMETERS, Hyperparameters, TrainConfig
from utils.config.words import ALIASES, ONLY_YOLOV5, YOLOV5_RECIPE
from utils.config.yaml_files import load_yaml, parse_yaml_value
from utils.errors import UserError, all_mistakes
from utils.program_folders import CONFIGS
from utils.schema import build, suggestion


def hyperparameters_from(
    path: str, overrides: Sequence[str] = (), lines: list[str] | None = None, *, base: Hyperparameters | None = None
) -> Hyperparameters:
    """Applies the YAML at ``path`` ("": no values) to ``base`` (None: the defaults), then `with_overrides`. Appends a
    log line to ``lines`` that names values without effect. Raises UserError that lists the mistakes."""
    values = load_yaml(path) if path else {}
    with all_mistakes() as mistakes:
        if isinstance(values, dict) and any(key in values for key in ONLY_YOLOV5):
            left_out = []
            for key, usual in YOLOV5_RECIPE.items():
                if key not in values:
                    continue
                value = values.pop(key)
                if usual is None or value == usual:
                    left_out.append(key)
                else:
                    is_known = key in HYPERPARAMETERS or key in TrainConfig.__dataclass_fields__
                    reason = "has another scale than in YOLOv5" if is_known else "does not exist here"
                    mistakes.add(f"{path}: '{key}': {reason}; remove it")
            if left_out and lines is not None:
                lines.append(f"{path}: YOLOv5's, left out: {', '.join(left_out)}; docs/migration.md says why")
        hyp = base or Hyperparameters()
        with mistakes.collecting():
            hyp = _changed(hyp, values, path or "hyper-parameters")
        with mistakes.collecting():
            hyp = with_overrides(hyp, overrides)
    return hyp


def given_hyperparameters(hyp: str, overrides: Sequence[str]) -> frozenset[str]:
    """Returns the names of the hyper-parameters to which the user gives a value: those in the file ``hyp`` and in
    ``overrides``. Built-in recipes count as defaults."""
    names = {item.partition("=")[0].strip() for item in overrides}
    if hyp != "auto" and not (CONFIGS / "hyp" / f"{hyp}.yaml").exists():
        names |= set(load_yaml(hyp) or ())
    return frozenset(names & set(HYPERPARAMETERS))


def with_overrides(hyp: Hyperparameters, overrides: Sequence[str]) -> Hyperparameters:
    """Returns ``hyp`` with each ``key=value`` of ``overrides`` applied; values are parsed as YAML."""
    values = {}
    for item in overrides:
        key, separator, text = item.partition("=")
        if not separator:
            raise UserError(f"--set {item}: must be key=value")
        values[key.strip()] = parse_yaml_value(text, f"--set {item}")
    return _changed(hyp, values, "--set")


def _changed(hyp: Hyperparameters, values: Any, location: str) -> Hyperparameters:
    """Returns ``hyp`` with ``values`` applied after checking them. Errors begin with ``location``."""
    checked = build(Hyperparameters, values, location, unknown_key)
    return dataclasses.replace(hyp, **{k: getattr(checked, k) for k in values or ()})


def unknown_key(key: str) -> str:
    """Returns a message about ``key``, which is not a hyper-parameter."""
    if key in TrainConfig.__dataclass_fields__:
        return f"'{key}': is a flag, not a hyper-parameter; give it as {flag_name(key)}"
    return f"unknown key '{key}'{suggestion(ALIASES['flag'].get(key, key), HYPERPARAMETERS)}"


def read_recipe(
    hyp: str, overrides: Sequence[str] = (), *, pretrained: bool, keep_old: bool = False, lines: list[str] | None = None
) -> Hyperparameters:
    """Reads the recipe that ``--hyp`` names and applies ``key=value`` overrides. (The optimizer is chosen later, by the
    number of steps: `engine.optim.build.resolve_optimizer`.)

    Args:
        hyp: "auto", the name of a recipe in configs/hyp, or a YAML file; keys that a file lacks are as with "auto".
            Raises UserError if it is none of these.
        pretrained, keep_old: whether the run starts from weights, and keeps their classes; these determine "auto".
    """
    if keep_old:
        automatic = "keep_old"
    elif pretrained:
        automatic = "finetune"
    else:
        automatic = "scratch"
    recipes = {path.stem: path for path in sorted((CONFIGS / "hyp").glob("*.yaml"))}
    recipe = automatic if hyp == "auto" else hyp
    if recipe in recipes:
        return hyperparameters_from(str(recipes[recipe]), overrides)
    if not os.path.exists(hyp):
        known = ", ".join(["auto", *recipes])
        hint = suggestion(hyp, recipes)
        raise UserError(f"--hyp {shlex.quote(hyp)}: no such recipe or file{hint}; known: {known}")
    return hyperparameters_from(hyp, overrides, lines, base=hyperparameters_from(str(recipes[automatic])))
