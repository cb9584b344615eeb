"""Builds optimisers: which parameter is updated by which rule."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from engine.optim.muon import Muon

DEFAULT_LR = {"SGD": 0.01, "Adam": 0.001, "AdamW": 0.001, "Muon": 0.008}
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def choose_optimizer(name: str, total_steps: int) -> str:
    """``auto`` by the length of the run: Muon learns fastest in a short one, SGD generalises best in a long one."""
    if name != "auto":
        return name
    return "Muon" if total_steps <= 20_000 else "SGD"


def split_parameters(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Trainable parameters as ``weight`` (matrices, kernels), ``norm`` (scales) and ``bias``; only the first decays."""
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


class OptimizerSet:
    """One or more torch optimisers that act as one: stepped, skipped, saved and scheduled together.

    It has the attributes that torch.amp.GradScaler requires of an optimiser that skips a step on the device
    (``param_groups``, ``_step_supports_amp_scaling``, ``grad_scale``, ``found_inf``), so a non-finite step needs no
    host sync.
    """

    _step_supports_amp_scaling = True

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None  # set by GradScaler
        self.skip: Tensor | None = None  # set by the step: float 0 or 1

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def consolidate(self) -> None:
        """Gathers sharded state on rank 0, whose `state_dict` is then complete. All ranks must call it."""
        for optimizer in self.optimizers:
            if _local(optimizer) is not optimizer:
                optimizer.consolidate_state_dict(to=0)

    def step(self) -> None:
        flags = [flag for flag in (self.found_inf, self.skip) if flag is not None]
        found = torch.stack([f.reshape(()).float() for f in flags]).amax() if flags else None
        for optimizer in self.optimizers:
            rule = _local(optimizer)
            rule.found_inf = found
            rule.grad_scale = None  # gradients are unscaled before
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def set_rates(self, schedule, step: int) -> None:
        """Learning rates and momenta of ``step`` (a `Schedule`)."""
        momentum = schedule.momentum_at(step)
        for group in self.param_groups:
            group["lr"] = schedule.learning_rate(step, group["initial_lr"], is_bias=group["kind"] == "bias")
            if "momentum" in group:
                group["momentum"] = momentum
            elif "betas" in group:
                group["betas"] = (momentum if group["follow_momentum"] else group["betas"][0], group["betas"][1])

    def rates(self) -> dict[str, float]:
        """Learning rates by kind of parameter; if some are pretrained, the rates of the others have own names."""
        lr_mults = {group["lr_mult"] for group in self.param_groups}
        return {
            f"lr/{'new_' if group['lr_mult'] == 1 and len(lr_mults) > 1 else ''}{group['kind']}": group["lr"]
            for group in self.param_groups
        }

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the state of each parameter. Options of the groups (rates, decay) stay as built from the settings.

        Raises ValueError for the state of another optimiser.
        """
        saved = state["optimizers"]
        rules = [_rule_of(content["param_groups"]) for content in saved]
        if rules != [_rule_of(optimizer.param_groups) for optimizer in self.optimizers]:
            raise ValueError("the checkpoint was written with another optimiser")
        for optimizer, content in zip(self.optimizers, saved):
            built = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            optimizer.load_state_dict(content)
            for group, options in zip(optimizer.param_groups, built):
                group.update(options)
                group.pop("share", None)  # the name of lr_mult in older checkpoints
            _lay_out_as_parameters(optimizer)
            _begin_momentum(optimizer)


def _local(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that holds this rank's state: the inner one of a ZeroRedundancyOptimizer, else itself."""
    return getattr(optimizer, "optim", optimizer)


def _rule_of(groups: list[dict[str, Any]]) -> list[tuple[bool, ...]]:
    """Equal for optimisers with compatible state (as Adam and AdamW)."""
    return [tuple(option in group for option in ("betas", "dampening")) for group in groups]


@torch.no_grad()
def _lay_out_as_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Gives loaded state the strides of its parameter: fused kernels do not check them."""
    rule = _local(optimizer)
    for parameter, values in rule.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


@torch.no_grad()
def _begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Gives SGD's parameters without a momentum buffer one of zeros, with which a first step has the same result.

    torch makes the buffer in the first step, and leaves it uninitialised if that step is skipped on the device; nor can
    one step update parameters with and without a buffer, of which some may have had no gradient before.
    """
    rule = _local(optimizer)
    if isinstance(rule, torch.optim.SGD):
        for parameter in (p for group in rule.param_groups for p in group["params"]):
            if rule.state[parameter].get("momentum_buffer") is None:
                rule.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def build_optimizer(
    model: nn.Module,
    name: str,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    pretrained: Collection[str] = (),
    pretrained_lr_mult: float = 1.0,
    sharded: bool = False,
) -> OptimizerSet:
    """SGD, Adam, AdamW, or Muon for weights with AdamW for the rest.

    Args:
        lr: initial learning rate; `DEFAULT_LR` has values for a run from scratch.
        pretrained: names of parameters that come from weights. Their rate is multiplied by ``pretrained_lr_mult``:
            layers that start at random have everything to learn, pretrained ones would forget.
        momentum: of SGD and Muon; beta1 of Adam and AdamW if they are the only rule.
        sharded: each process keeps the state of its part of the parameters only, updates them and broadcasts them to
            the others (ZeRO stage 1, Rajbhandari et al. 2020). The saved state is complete.
    """
    kinds = split_parameters(model)
    known = {id(model.get_parameter(name)) for name in pretrained}

    def groups(*wanted: str, follow_momentum: bool = True) -> list[dict[str, Any]]:
        return [
            {
                "params": parameters,
                "weight_decay": weight_decay if kind == "weight" else 0.0,
                "kind": kind,
                "lr_mult": lr_mult,
                "initial_lr": lr * lr_mult,
                "lr": lr * lr_mult,
                "follow_momentum": follow_momentum,
            }
            for kind in wanted
            for lr_mult, parameters in by_lr_mult(kinds[kind])
        ]

    def by_lr_mult(parameters: list[nn.Parameter]) -> list[tuple[float, list[nn.Parameter]]]:
        slow, full = [p for p in parameters if id(p) in known], [p for p in parameters if id(p) not in known]
        return [(lr_mult, some) for lr_mult, some in ((pretrained_lr_mult, slow), (1.0, full)) if some]

    def rule(optimizer: type, groups: list[dict[str, Any]], **options) -> torch.optim.Optimizer:
        if sharded:
            from torch.distributed.optim import ZeroRedundancyOptimizer  # takes half a second to import

            return ZeroRedundancyOptimizer(groups, optimizer_class=optimizer, lr=lr, **options)
        return optimizer(groups, lr=lr, **options)

    betas = (momentum, 0.999)
    every = groups(*kinds)
    if name == "SGD":
        sgd = rule(torch.optim.SGD, every, momentum=momentum, nesterov=momentum > 0, fused=True)
        _begin_momentum(sgd)
        return OptimizerSet([sgd])
    if name == "Adam":
        return OptimizerSet([rule(torch.optim.Adam, every, betas=betas, fused=True)])
    if name == "AdamW":
        return OptimizerSet([rule(torch.optim.AdamW, every, betas=betas, fused=True)])
    if name != "Muon":
        raise ValueError(f"unknown optimiser {name!r}")
    parts: list[torch.optim.Optimizer] = []
    if kinds["weight"]:
        parts.append(rule(Muon, groups("weight"), momentum=momentum))
    if rest := groups("norm", "bias", follow_momentum=False):
        parts.append(rule(torch.optim.AdamW, rest, betas=(0.9, 0.999), fused=True))
    return OptimizerSet(parts)
