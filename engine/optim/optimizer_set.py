"""The optimizers of a run as one: stepped, skipped on the device, scheduled, saved and restored together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from engine.optim.schedule import Schedule


class RowRates(NamedTuple):
    """A parameter of which only some rows come from weights: each row has its own step size."""

    parameter: nn.Parameter
    factors: Tensor  # (rows, 1, ...), relative to the group's step


class OptimizerSet:
    """One or more torch optimizers that act as one: stepped, skipped, saved and scheduled together."""

    def __init__(
        self, optimizers: list[torch.optim.Optimizer], name: str, lr: float, row_rates: Sequence[RowRates] = ()
    ) -> None:
        self.optimizers = optimizers
        self.name = name
        self.lr = lr  # initial rate, which a group's `lr_mult` multiplies
        self._row_rates = row_rates

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
        if self.parameters[0].is_cuda:  # gathering copies to the host without waiting
            torch.cuda.synchronize(self.parameters[0].device)

    @torch.no_grad()
    def step(self, nonfinite: Tensor | None = None) -> None:
        """Updates the parameters with their gradients, which must be unscaled.

        ``nonfinite``: float32 () on the device; 1 makes the step change nothing, without a host sync.
        """
        before = [rates.parameter.detach().clone() for rates in self._row_rates]
        for optimizer in self.optimizers:
            local = cast(_SkipsOnDevice, _local(optimizer))
            local.found_inf = nonfinite  # torch's fused kernels, and Muon, change nothing where it is 1
            local.grad_scale = None
            optimizer.step()
        for (parameter, factors), old in zip(self._row_rates, before):
            parameter.copy_(torch.lerp(old, parameter, factors))

    def zero_grad(self) -> None:
        """Sets all gradients to None."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def set_rates(self, schedule: Schedule, step: int) -> None:
        """Sets the learning rates and momenta of all groups for ``step``."""
        momentum = schedule.momentum_at(step)
        for group in self.param_groups:
            # An absolute rate, as in YOLOv5: `lr_factor` does not multiply it. Loaded biases start slower as well.
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
            fill_momentum_buffers(optimizer)


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
    another shape: torch matches state by position alone, and fused kernels would crash the process."""
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
def fill_momentum_buffers(optimizer: torch.optim.Optimizer) -> None:
    """Gives SGD's parameters a momentum buffer of zeros if they have none; the first step has the same result. torch
    leaves the buffer uninitialized if the first step is skipped on the device, and cannot update parameters with and
    without a buffer in one step."""
    local = _local(optimizer)
    if isinstance(local, torch.optim.SGD):
        parameters = [parameter for group in local.param_groups for parameter in group["params"]]
        for parameter in parameters:
            if local.state[parameter].get("momentum_buffer") is None:
                local.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
