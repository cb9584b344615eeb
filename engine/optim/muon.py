"""Muon: momentum with orthogonalized updates (Jordan et al. 2024, kellerjordan.github.io/posts/muon), for matrices and
convolution kernels. torch.optim.Muon supports 2-D parameters only; for those the two agree.

Matrices of equal or transposed shape are orthogonalized in one batch, which saves kernel launches, and the host never
waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from utils.machine.devices import cpu_multiplies_bf16

# The quintic of the reference implementation: steepest at 0, singular values end in about [0.7, 1.2].
_A, _B, _C = 3.4445, -4.7750, 2.0315


@cache
def iteration_dtype(device_type: str) -> torch.dtype:
    """Returns bfloat16, or float32 on a CPU that emulates bfloat16, where its products take ten times as long."""
    if device_type == "cpu" and not cpu_multiplies_bf16():
        return torch.float32
    return torch.bfloat16


def orthogonalize(matrices: Tensor) -> Tensor:
    """Maps each of ``matrices`` (n, rows, columns), rows <= columns, to about its nearest semi-orthogonal matrix, by
    Newton-Schulz iteration in their type."""
    x = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x


def as_matrix(tensor: Tensor) -> Tensor:
    """Flattens a tensor to (first dimension, product of the others); copies only kernels that are not channels_last."""
    if tensor.dim() == 4:
        tensor = tensor.permute(0, 2, 3, 1)  # the memory order of channels_last
    return tensor.flatten(1)


def unflatten(matrix: Tensor, like: Tensor) -> Tensor:
    """Returns a view of ``matrix`` in the shape of ``like``; undoes `as_matrix`."""
    if like.dim() != 4:
        return matrix.view(like.shape)
    out_channels, in_channels, height, width = like.shape
    return matrix.view(out_channels, height, width, in_channels).permute(0, 3, 1, 2)


class Muon(Optimizer):
    """Muon with Nesterov momentum for parameters of two or more dimensions, each viewed as a matrix (first, product of
    the others).

    Columns are in memory order, since their order does not affect the result. The learning rate is scaled by
    ``0.2 * sqrt(max(rows, columns))``: updates then have the size of AdamW's, whose learning rates and weight decay
    carry over (Liu et al. 2025, arXiv 2502.16982). All parameters of a group have one type and device.

    Attributes:
        found_inf: if set, a float tensor () on the device; 1 makes the next steps no-ops without a host sync.
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.found_inf: Tensor | None = None

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates all parameters that have a gradient. ``closure`` must be None: the loss is not computed again."""
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update(parameters, group)
        return None

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Updates ``parameters`` of ``group``, all of which have a gradient."""
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        bad = (parameters[0].new_zeros(()) if self.found_inf is None else self.found_inf).bool()
        keep = 1 - bad.to(parameters[0].dtype)
        gradients = []
        for buffer, parameter in zip(buffers, parameters):
            gradient = cast(Tensor, parameter.grad)  # `step` passes only parameters with a gradient
            gradients.append(torch.where(bad, buffer, gradient))  # the momentum does not change where the step is bad
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, buffers, group["momentum"])
        moves = _orthogonal_moves([as_matrix(update) for update in updates], keep * group["lr"])
        torch._foreach_mul_(parameters, 1 - keep * (group["lr"] * group["weight_decay"]))
        torch._foreach_sub_(parameters, [unflatten(move, p) for move, p in zip(moves, parameters)])


def _orthogonal_moves(matrices: list[Tensor], rate: Tensor) -> list[Tensor]:
    """Returns the orthogonalized matrices, times ``rate`` () and the factor of their size."""
    wide = [matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix for matrix in matrices]
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for number, matrix in enumerate(wide):
        by_shape[matrix.shape].append(number)
    moves = list(matrices)
    for (_, columns), members in by_shape.items():
        stacked = torch.stack([wide[number] for number in members])
        orthogonal = orthogonalize(stacked.to(iteration_dtype(stacked.device.type))).to(stacked.dtype)
        for number, move in zip(members, orthogonal * (rate * (0.2 * columns**0.5))):
            moves[number] = move.mT if wide[number] is not matrices[number] else move
    return moves
