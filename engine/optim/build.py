"""Builds optimizers: which parameter is updated by which rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from engine.optim.muon import Muon
from engine.optim.schedule import Schedule

SHORT_RUN = 20_000  # steps
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def choose_optimizer(name: str, total_steps: int) -> str:
    """Resolves ``auto`` by the length of the run: Muon learns fastest in a short one, SGD generalizes best in a long
    one."""
    if name != "auto":
        return name
    return "Muon" if total_steps <= SHORT_RUN else "SGD"


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


class RowRates(NamedTuple):
    """A parameter of which only some rows come from weights: each row takes a fraction of the group's step."""

    parameter: nn.Parameter
    factors: Tensor  # (rows, 1, ...), between 0 and 1


class OptimizerSet:
    """One or more torch optimizers that act as one: stepped, skipped, saved and scheduled together.

    It has the attributes that torch.amp.GradScaler requires of an optimizer that skips a step on the device
    (``param_groups``, ``_step_supports_amp_scaling``, ``grad_scale``, ``found_inf``), so a non-finite step needs no
    host sync.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self, optimizers: list[torch.optim.Optimizer], name: str = "", row_rates: Sequence[RowRates] = ()
    ) -> None:
        self.optimizers = optimizers
        self.name = name
        self._row_rates = row_rates
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None  # set by GradScaler
        self.found_nonfinite: Tensor | None = None  # set by the step: float 1 where a gradient is not finite, else 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def consolidate(self) -> None:
        """Gathers sharded state on rank 0, whose `state_dict` is then complete. All ranks must call it."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, _Sharded):
                optimizer.consolidate_state_dict(to=0)
        if self.parameters[0].is_cuda:  # it copies to the host without waiting
            torch.cuda.synchronize(self.parameters[0].device)

    @torch.no_grad()
    def step(self) -> None:
        """Updates the parameters, unless `found_inf` or `found_nonfinite` is 1 on the device."""
        flags = [flag.reshape(()).float() for flag in (self.found_inf, self.found_nonfinite) if flag is not None]
        skipped = torch.stack(flags).amax() if flags else None
        before = [rates.parameter.detach().clone() for rates in self._row_rates]
        for optimizer in self.optimizers:
            local = cast(_SkipsOnDevice, _local(optimizer))
            local.found_inf = skipped  # torch's fused kernels, and Muon, change nothing where it is 1
            local.grad_scale = None  # gradients are unscaled before
            optimizer.step()
        for (parameter, factors), old in zip(self._row_rates, before):
            parameter.copy_(torch.lerp(old, parameter, factors))

    def zero_grad(self) -> None:
        """Sets all gradients to None."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def set_rates(self, schedule: Schedule, step: int) -> None:
        """Sets the learning rates and momenta of all groups to those of ``step``."""
        momentum = schedule.momentum_at(step)
        for group in self.param_groups:
            start = schedule.warmup_bias_lr * group["lr_mult"] if group["kind"] == "bias" else 0.0
            group["lr"] = schedule.learning_rate(step, group["initial_lr"], start=start)
            if "momentum" in group:
                group["momentum"] = momentum
            elif "betas" in group:
                beta1, beta2 = group["betas"]
                group["betas"] = (momentum if group["follow_momentum"] else beta1, beta2)

    def rates(self) -> dict[str, float]:
        """Returns learning rates by kind of parameter. If loaded parameters have rates of their own, the names of the
        others begin with ``new_``."""
        has_two_rates = len({group["lr_mult"] for group in self.param_groups}) > 1
        rates = {}
        for group in self.param_groups:
            prefix = "new_" if has_two_rates and group["is_new"] else ""
            rates[f"lr/{prefix}{group['kind']}"] = group["lr"]
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the optimizers, in their order."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the state of each parameter; options of the groups (rates, decay) stay. Raises ValueError for the state
        of another optimizer or of other parameters."""
        saved = state["optimizers"]
        rules = [_rule_of(content["param_groups"]) for content in saved]
        if rules != [_rule_of(optimizer.param_groups) for optimizer in self.optimizers]:
            raise ValueError("the checkpoint was written with another optimizer")
        for optimizer, content in zip(self.optimizers, saved):
            built = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            optimizer.load_state_dict(content)
            for group, options in zip(optimizer.param_groups, built):
                group.update(options)
            _lay_out_as_parameters(optimizer)
            _fill_momentum_buffers(optimizer)


@runtime_checkable
class _Sharded(Protocol):
    """`engine.optim.zero.ShardedOptimizer`, which is imported late."""

    optim: torch.optim.Optimizer

    def consolidate_state_dict(self, to: int = 0) -> None: ...


class _SkipsOnDevice(Protocol):
    """Attributes that torch's fused optimizers and `Muon` read; torch does not declare them."""

    found_inf: Tensor | None
    grad_scale: Tensor | None


def _local(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer that holds this rank's state: the inner one of a ZeroRedundancyOptimizer, else itself."""
    return optimizer.optim if isinstance(optimizer, _Sharded) else optimizer


def _rule_of(groups: list[dict[str, Any]]) -> list[tuple[bool, ...]]:
    """Identifies the kind of state: equal for optimizers with compatible state, such as Adam and AdamW."""
    return [tuple(option in group for option in ("betas", "dampening")) for group in groups]


@torch.no_grad()
def _lay_out_as_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Gives loaded state the strides of its parameter, which fused kernels do not check. Raises ValueError for state of
    another shape: torch matches it by position alone, and with fused kernels it crashes the process."""
    for parameter, values in _local(optimizer).state.items():
        for name, value in values.items():
            if not isinstance(value, Tensor) or not value.ndim:
                continue
            if value.shape != parameter.shape:
                shapes = f"{list(value.shape)} for a parameter of shape {list(parameter.shape)}"
                raise ValueError(f"the optimizer's {name} has shape {shapes}; the run trained other layers")
            if value.stride() != parameter.stride():
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


@torch.no_grad()
def _fill_momentum_buffers(optimizer: torch.optim.Optimizer) -> None:
    """Gives SGD's parameters without a momentum buffer one of zeros, with which a first step has the same result.
    torch leaves the buffer uninitialized if the first step is skipped on the device, and cannot update parameters with
    and without a buffer in one step."""
    local = _local(optimizer)
    if isinstance(local, torch.optim.SGD):
        parameters = [parameter for group in local.param_groups for parameter in group["params"]]
        for parameter in parameters:
            if local.state[parameter].get("momentum_buffer") is None:
                local.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


Groups = list[dict[str, Any]]
Construct = Callable[..., torch.optim.Optimizer]  # an optimizer class, groups and its options


def _sgd(groups: Groups, construct: Construct, momentum: float) -> list[torch.optim.Optimizer]:
    sgd = construct(torch.optim.SGD, groups, momentum=momentum, nesterov=momentum > 0, fused=True)
    _fill_momentum_buffers(sgd)
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
    """How an optimizer is built, and its default learning rate."""

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
    """How an optimizer updates parameters, whatever its rule."""

    lr: float | None = None  # initial learning rate; None: that of the rule
    lr_factor: float = 1.0  # multiplies it in either case
    momentum: float  # of SGD and Muon, and beta1 of Adam and AdamW when they are the only rule
    weight_decay: float
    sharded: bool = False  # each process keeps the state of its part of the parameters (`engine.optim.zero`)


@dataclass(frozen=True, kw_only=True)
class LoadedParameters:
    """Parameters that come from weights, and the rates at which they and the others learn."""

    new_rows: Mapping[str, Sequence[int]] = field(default_factory=dict)  # by name, rows that are not loaded (classes)
    lr_mult: float = 1.0  # multiplies the rate of all their other rows
    new_lr_mult: float = 1.0  # multiplies the rule's rate for parameters and rows that are not loaded, if others are

    def row_rates(self, model: nn.Module, new_lr_mult: float) -> list[RowRates]:
        """Returns the rates of parameters of which only some rows are loaded, relative to those of the new rows."""
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

    An explicit ``lr`` is also that of new parameters: `LoadedParameters.new_lr_mult` has no effect on it.
    """
    rule = RULES[name]
    has_own_rate = settings.lr is None and loaded.new_rows
    new_lr_mult = loaded.new_lr_mult if has_own_rate else 1.0
    lr = (rule.lr if settings.lr is None else settings.lr) * settings.lr_factor

    def construct(optimizer_class: type, groups: Groups, **options: Any) -> torch.optim.Optimizer:
        if not settings.sharded:
            return optimizer_class(groups, lr=lr, **options)
        from engine.optim.zero import ShardedOptimizer  # here, as importing torch.distributed.optim takes seconds

        return ShardedOptimizer(groups, optimizer_class=optimizer_class, lr=lr, **options)

    groups = _parameter_groups(model, settings, loaded, lr=lr, new_lr_mult=new_lr_mult)
    optimizers = rule.build(groups, construct, settings.momentum)
    return OptimizerSet(optimizers, name, loaded.row_rates(model, new_lr_mult))


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
