"""Checks that all processes of a run have the same settings, code, model and data. Otherwise collectives would hang or
mix up the values that they gather, or training would silently produce wrong weights."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from utils.config.recipes import MissingRecipe, read_recipe
from utils.config.settings import TrainConfig, ValConfig, names_with
from utils.distributed.context import DistributedContext, all_objects
from utils.errors import PeerFailure, UserError
from utils.program_folders import PROJECT
from utils.strings import rank_list

CODE_FOLDERS = ("utils", "data", "models", "engine", "scripts")  # "scripts" exists in the installed package only
_MAX_LISTED_FACTS = 4
_MAX_SHOWN_CHARACTERS = 60


class _Model(Protocol):
    """The attributes that this module reads from a `models.detector.Detector` or a model from an exported file."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def spec(self) -> Mapping[str, Any]: ...


def check_agreement(ctx: DistributedContext, facts: Mapping[str, object]) -> None:
    """Raises UserError on rank 0 and PeerFailure on the others if ``facts`` differ between processes. Every process
    must call this. Facts are JSON-serializable; their keys are their names in messages."""
    facts_by_rank = all_objects(ctx, {name: _shown(value) for name, value in facts.items()})
    differences: list[str] = []
    for name in dict.fromkeys(itertools.chain(*facts_by_rank)):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, rank_facts in enumerate(facts_by_rank):
            ranks_by_value.setdefault(str(rank_facts.get(name)), []).append(rank)
        if len(ranks_by_value) > 1:
            values = [f"{value} on {rank_list(ranks)}" for value, ranks in ranks_by_value.items()]
            differences.append(f"{name} is {', but '.join(values)}")
    if not differences:
        return
    message = f"the processes of this run differ: {'; '.join(differences[:_MAX_LISTED_FACTS])}"
    if len(differences) > _MAX_LISTED_FACTS:
        message += f"; and {len(differences) - _MAX_LISTED_FACTS} more"
    error_type = UserError if ctx.is_main else PeerFailure
    raise error_type(message)


def check_same_start(ctx: DistributedContext, config: TrainConfig | ValConfig) -> None:
    """Raises UserError if the processes differ in flags, recipes, code or torch version. Called before anything else
    is opened."""
    if ctx.world_size == 1:
        return
    facts = {"the code": product_version(), "torch": torch.__version__, "the device's type": ctx.device.type}
    facts |= {f"--{name.replace('_', '-')}": value for name, value in _compared(config).items()}
    facts["--stage"] = "given" if config.stage else "not given"
    check_agreement(ctx, facts)
    if isinstance(config, TrainConfig):
        _check_same_recipe(ctx, config)


def check_same_model(ctx: DistributedContext, model: _Model, from_files: Iterable[Tensor]) -> None:
    """Raises UserError if the processes differ in their models, or in the weights ``from_files`` that they read."""
    if ctx.world_size == 1:
        return
    facts: dict[str, object] = {"the class names": list(model.names), "the model": model.spec}
    facts["the checksum of the starting weights"] = sum(_checksum(tensor) for tensor in from_files)
    check_agreement(ctx, facts)


def product_version() -> str:
    """Returns a digest of the source files that determine a result, so not of tools, as 12 hex digits. In the installed
    package, the modules of the Python interface lie beside these files, and count too."""
    digest = hashlib.blake2b(digest_size=6)
    files = [*PROJECT.glob("*.py"), *(path for package in CODE_FOLDERS for path in (PROJECT / package).rglob("*.py"))]
    for path in sorted(files):
        digest.update(path.relative_to(PROJECT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _shown(value: object) -> str:
    """Returns the value as JSON, so that no two values look the same, which is shortened to its beginning and a digest
    if it is long."""
    text = json.dumps(value, sort_keys=True, default=str, ensure_ascii=False)
    if len(text) <= _MAX_SHOWN_CHARACTERS:
        return text
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{text[: _MAX_SHOWN_CHARACTERS // 2].encode('utf-8', 'replace').decode()}... ({digest})"


def _compared(config: TrainConfig | ValConfig) -> dict[str, Any]:
    """Returns the settings that all processes must share. ``--hyp`` and ``--set`` are compared by value instead."""
    config_type = type(config)
    ignored = names_with(config_type, scope="machine") | names_with(config_type, scope="recipe")
    return {name: value for name, value in asdict(config).items() if name not in ignored}


def _check_same_recipe(ctx: DistributedContext, config: TrainConfig) -> None:
    """Raises UserError if the processes read different recipes: rank 0 reads the recipe for all, so the values that
    only another process was given would be ignored. A file that all processes name but one of them lacks is no
    difference: rank 0 reports it, or does not need it because the run has stored its values."""
    recipe = _read_own_recipe(config)
    recipes = all_objects(ctx, recipe)
    if recipe.is_missing:
        recipe = next((r for r in recipes if r.flags == recipe.flags and not r.is_missing), recipe)
    check_agreement(ctx, {"the error in reading --hyp": recipe.error or None})
    if not recipe.error:
        check_agreement(ctx, {f"hyper-parameter {name}": value for name, value in recipe.values.items()})


class _ReadRecipe(NamedTuple):
    """The recipe as a process reads it."""

    flags: tuple[str, list[str]]  # ``--hyp`` and ``--set``
    values: dict[str, Any]  # by hyper-parameter; empty after an error
    error: str = ""
    is_missing: bool = False  # the error: there is no such recipe or file


def _read_own_recipe(config: TrainConfig) -> _ReadRecipe:
    flags = (config.hyp, config.override)
    try:
        hyp = read_recipe(config.hyp, config.override, pretrained=bool(config.weights), keep_old=config.keep_old)
    except UserError as error:
        return _ReadRecipe(flags, {}, str(error), is_missing=isinstance(error, MissingRecipe))
    return _ReadRecipe(flags, asdict(hyp))


def _checksum(tensor: Tensor) -> int:
    """Sums the bits as integers, so that the result does not depend on the order of addition."""
    flat = tensor.detach().reshape(-1)
    return int(flat.view(torch.int32 if flat.element_size() == 4 else torch.uint8).sum(dtype=torch.int64))
