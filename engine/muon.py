"""Muon: momentum whose update is orthogonalised (Jordan et al. 2024, kellerjordan.github.io/posts/muon), for matrices
and convolution kernels. torch.optim.Muon takes 2-D parameters only; on those the two agree."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor
from torch.optim import Optimizer

from engine.memory_order import as_matrix, unflatten

# The quintic of the reference implementation: steepest at 0, singular values end in about [0.7, 1.2].
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalise(matrices: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrix of each of (n, rows, columns), in bfloat16."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(Optimizer):
    """Muon over parameters of two or more dimensions, each seen as (first, product of the others), the others in the
    order of its memory: the order of columns changes nothing but which copies are needed.

    The rate is scaled by ``0.2 * sqrt(max(rows, columns))`` so that updates have AdamW's size and its learning rates
    and weight decay carry over (Liu et al. 2025, arXiv 2502.16982). Matrices of one shape, or its transpose, are
    orthogonalised in one batch.

    ``found_inf``, a float tensor of 0 or 1 on the device, makes a step a no-op without a host sync.
    """

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.0, nesterov: bool = True):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults)
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure=None) -> None:
        if closure is not None:
            raise ValueError("closures are not supported")
        for group in self.param_groups:
            alike = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[(parameter.dtype, parameter.device)].append(parameter)
            for parameters in alike.values():
                self._update(parameters, group)

    def _update(self, parameters: list[Tensor], group: dict) -> None:
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        gradients, keep = [parameter.grad for parameter in parameters], 1.0
        if self.found_inf is not None:
            bad = self.found_inf.to(parameters[0].device).bool()
            # Momentum then stays as it is.
            gradients = [torch.where(bad, buffer, gradient) for buffer, gradient in zip(buffers, gradients)]
            keep = 1 - bad.to(parameters[0].dtype)
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, buffers, group["momentum"]) if group["nesterov"] else buffers
        moves = self._orthogonal([as_matrix(update) for update in updates], keep * group["lr"])
        torch._foreach_mul_(parameters, 1 - keep * (group["lr"] * group["weight_decay"]))
        torch._foreach_sub_(parameters, [unflatten(move, p) for move, p in zip(moves, parameters)])

    def _orthogonal(self, matrices: list[Tensor], rate: float | Tensor) -> list[Tensor]:
        """Of each matrix the orthogonal one, times ``rate`` and the factor of its shape."""
        is_tall = [matrix.shape[0] > matrix.shape[1] for matrix in matrices]
        by_shape = defaultdict(list)
        for index, (matrix, tall) in enumerate(zip(matrices, is_tall)):
            by_shape[matrix.mT.shape if tall else matrix.shape].append(index)
        moves = list(matrices)
        for (_, long), members in by_shape.items():
            batch = torch.stack([matrices[i].mT if is_tall[i] else matrices[i] for i in members])
            for i, move in zip(members, orthogonalise(batch) * (rate * (0.2 * long**0.5))):
                moves[i] = move.mT if is_tall[i] else move
        return moves
