"""Builds optimizers, and decides which rule updates which parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.optim.muon import Muon
from engine.optim.optimizer_set import OptimizerSet, RowRates, fill_momentum_buffers

SHORT_RUN = 20_000  # steps
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def resolve_optimizer(name: str, planned_steps: float) -> str:
    """Resolves ``auto`` by the length of the run: Muon learns fastest in a short one, SGD generalizes best in a long
    one. A run whose length is unknown (inf) ends by the clock, and Muon has learned more by then."""
    if name != "auto":
        return name
    is_short = planned_steps <= SHORT_RUN or math.isinf(planned_steps)
    return "Muon" if is_short else "SGD"


def split_parameters(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Sorts trainable parameters into ``weight`` (matrices, kernels), ``norm`` (scales) and ``bias``. Only the first
    decays."""
    groups: dict[str, list[nn.Parameter]] = {"weight": [], "norm": [], "bias": []}
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if name == "bias":
                kind = "bias"
            elif isinstance(module, _NORMS) or parameter.ndim < 2:
                kind = "norm"
            else:
                kind = "weight"
            groups[kind].append(parameter)
    return groups


Groups = list[dict[str, Any]]
Construct = Callable[..., torch.optim.Optimizer]  # an optimizer class, groups and its options


def _sgd(groups: Groups, construct: Construct, momentum: float) -> list[torch.optim.Optimizer]:
    sgd = construct(torch.optim.SGD, groups, momentum=momentum, nesterov=momentum > 0, fused=True)
    fill_momentum_buffers(sgd)
    return [sgd]


def _adam(kind: type, groups: Groups, construct: Construct, momentum: float) -> list[torch.optim.Optimizer]:
    return [construct(kind, groups, betas=(momentum, 0.999), fused=True)]


def _muon(groups: Groups, construct: Construct, momentum: float) -> list[torch.optim.Optimizer]:
    """Builds Muon for weights and AdamW for the rest."""
    weights = [group for group in groups if group["kind"] == "weight"]
    rest = [group | {"follow_momentum": False} for group in groups if group["kind"] != "weight"]
    optimizers = []
    if weights:
        optimizers.append(construct(Muon, weights, momentum=momentum))
    if rest:
        optimizers.append(construct(torch.optim.AdamW, rest, betas=(0.9, 0.999), fused=True))
    return optimizers


class Rule(NamedTuple):
    """The constructor of an optimizer, and its default learning rate."""

    lr: float  # initial learning rate that suits a run from scratch
    build: Callable[[Groups, Construct, float], list[torch.optim.Optimizer]]


# A new optimizer is a line here, and its name a choice of ``--optimizer`` (`TrainConfig`).
RULES = {
    "SGD": Rule(0.01, _sgd),
    "Adam": Rule(0.001, partial(_adam, torch.optim.Adam)),
    "AdamW": Rule(0.001, partial(_adam, torch.optim.AdamW)),
    "Muon": Rule(0.008, _muon),
}


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Settings of the updates of an optimizer, whatever its rule."""

    lr: float | None = None  # initial learning rate; None: the rate of the rule
    lr_factor: float = 1.0  # multiplies it in either case
    momentum: float  # momentum of SGD and Muon, and beta1 of Adam and AdamW when they are the only rule
    weight_decay: float
    sharded: bool = False  # each process keeps the state of its part of the parameters (`engine.optim.zero`)


@dataclass(frozen=True, kw_only=True)
class LoadedParameters:
    """Parameters that come from weights, and the rates at which they and the others learn."""

    new_rows: Mapping[str, Sequence[int]] = field(default_factory=dict)  # rows that are not loaded, by parameter
    lr_mult: float = 1.0  # multiplies the rate of all rows that are loaded
    new_lr_mult: float = 1.0  # multiplies the rule's rate for parameters and rows that are not loaded, if others are

    def row_rates(self, model: nn.Module, new_lr_mult: float) -> list[RowRates]:
        """Returns the rates of parameters with both loaded and new rows, relative to the rates of the new rows."""
        relative = self.lr_mult / new_lr_mult
        if relative == 1:
            return []
        rates = []
        for name, new_rows in self.new_rows.items():
            if new_rows:
                parameter = model.get_parameter(name)
                factors = parameter.new_full((len(parameter), *(1,) * (parameter.ndim - 1)), relative)
                factors[list(new_rows)] = 1.0
                rates.append(RowRates(parameter, factors))
        return rates


NOTHING_LOADED = LoadedParameters()


def build_optimizer(
    model: nn.Module, name: str, settings: OptimizerSettings, loaded: LoadedParameters = NOTHING_LOADED
) -> OptimizerSet:
    """Builds the optimizer ``name`` of `RULES`.

    An explicit ``lr`` also applies to new parameters: `LoadedParameters.new_lr_mult` has no effect on it.
    """
    rule = RULES[name]
    has_own_rate = settings.lr is None and loaded.new_rows
    new_lr_mult = loaded.new_lr_mult if has_own_rate else 1.0
    lr = (rule.lr if settings.lr is None else settings.lr) * settings.lr_factor

    def construct(optimizer_class: type, groups: Groups, **options: Any) -> torch.optim.Optimizer:
        if not settings.sharded:
            return optimizer_class(groups, lr=lr, **options)
        from engine.optim.zero import ShardedOptimizer  # here, because importing torch.distributed.optim takes seconds

        return ShardedOptimizer(groups, optimizer_class=optimizer_class, lr=lr, **options)

    groups = _parameter_groups(model, settings, loaded, lr=lr, new_lr_mult=new_lr_mult)
    optimizers = rule.build(groups, construct, settings.momentum)
    return OptimizerSet(optimizers, name, lr, loaded.row_rates(model, new_lr_mult))


def _parameter_groups(
    model: nn.Module, settings: OptimizerSettings, loaded: LoadedParameters, *, lr: float, new_lr_mult: float
) -> Groups:
    """Groups parameters that have one rate and one weight decay: by kind, loaded ones before new ones."""
    loaded_ids = {id(model.get_parameter(name)) for name, new_rows in loaded.new_rows.items() if not new_rows}
    groups: Groups = []
    for kind, parameters in split_parameters(model).items():
        weight_decay = settings.weight_decay if kind == "weight" else 0.0
        for is_new, lr_mult in ((False, loaded.lr_mult), (True, new_lr_mult)):
            members = [parameter for parameter in parameters if (id(parameter) not in loaded_ids) == is_new]
            if not members:
                continue
            groups.append(
                {
                    "params": members,
                    "weight_decay": weight_decay,
                    "kind": kind,
                    "is_new": is_new,
                    "lr_mult": lr_mult,
                    "initial_lr": lr * lr_mult,
                    "lr": lr * lr_mult,
                    "follow_momentum": True,
                }
            )
    return groups
