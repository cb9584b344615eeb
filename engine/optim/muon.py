"""Muon: momentum with orthogonalized updates (Jordan et al. 2024, kellerjordan.github.io/posts/muon), for matrices and
convolution kernels. torch.optim.Muon supports 2-D parameters only; for those the two agree.

Matrices of equal or transposed shape are orthogonalized in one batch. On a GPU, kernel launches and not arithmetic
limit the update of a small model, so matrices of similar shapes are padded with zeros to a common one, which does not
change the others: the 63 matrices of yolov8n, of 29 shapes, become 5 batches of about 25 launches. The rest takes 3
launches per parameter, and the host never waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple, cast, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from utils.machine.devices import cpu_multiplies_bf16

# The quintic of the reference implementation: steepest at 0, singular values end in about [0.7, 1.2].
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ALIGNMENT = 8  # sides are padded to multiples of this for tensor cores
_BATCH_COST = 2_000_000  # number of values whose iteration takes about as long as the kernel launches of one batch


def pads_matrices(device: torch.device) -> bool:
    """Returns whether matrices on ``device`` are padded to common shapes."""
    return device.type == "cuda"


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


class MatrixBatch(NamedTuple):
    """Matrices that are orthogonalized together."""

    members: list[int]
    rows: int
    columns: int


def plan_batches(shapes: Sequence[tuple[int, int]], *, padded: bool) -> list[MatrixBatch]:
    """Groups matrices of ``shapes`` into batches of a common shape with rows <= columns; tall matrices are transposed.
    If ``padded``, repeatedly merges the two batches whose union saves most, as long as the padding costs less than the
    kernel launches of another batch."""

    def cost(batch: MatrixBatch) -> float:
        # The time of the products grows with the rows; below about 512 memory traffic outweighs them.
        return _BATCH_COST + len(batch.members) * batch.rows * batch.columns * (1 + batch.rows / 512)

    def union(a: MatrixBatch, b: MatrixBatch) -> MatrixBatch:
        return MatrixBatch([*a.members, *b.members], max(a.rows, b.rows), max(a.columns, b.columns))

    unit = _ALIGNMENT if padded else 1
    by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, shape in enumerate(shapes):
        rows, columns = (-(-side // unit) * unit for side in sorted(shape))
        by_shape[rows, columns].append(number)
    batches = [MatrixBatch(members, rows, columns) for (rows, columns), members in by_shape.items()]
    while padded and len(batches) > 1:
        saving, a, b = max(
            ((cost(a) + cost(b) - cost(union(a, b)), a, b) for a, b in combinations(batches, 2)),
            key=lambda candidate: candidate[0],
        )
        if saving <= 0:
            break
        batches = [batch for batch in batches if batch is not a and batch is not b] + [union(a, b)]
    return batches


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
        self._plans: dict[tuple[tuple[int, int], ...], list[tuple[MatrixBatch, Tensor]]] = {}  # see `_plan`

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
        moves = self._orthogonalize([as_matrix(update) for update in updates], keep * group["lr"])
        torch._foreach_mul_(parameters, 1 - keep * (group["lr"] * group["weight_decay"]))
        torch._foreach_sub_(parameters, [unflatten(move, p) for move, p in zip(moves, parameters)])

    def _orthogonalize(self, matrices: list[Tensor], rate: Tensor) -> list[Tensor]:
        """Returns the orthogonalized matrices, times ``rate`` () and the factor of their size."""
        wide = [matrix.mT if _is_tall(matrix) else matrix for matrix in matrices]
        moves: dict[int, Tensor] = {}
        for batch, factors in self._plan(wide):
            members = [wide[i] for i in batch.members]
            orthogonal = orthogonalize(_stack_padded(members, batch.rows, batch.columns))
            scaled = orthogonal.to(matrices[0].dtype) * (rate * factors)
            for i, move in zip(batch.members, _without_padding(scaled, members)):
                moves[i] = move.mT if _is_tall(matrices[i]) else move
        return [moves[i] for i in range(len(matrices))]

    def _plan(self, wide: Sequence[Tensor]) -> list[tuple[MatrixBatch, Tensor]]:
        """Returns the batches of the matrices ``wide``, each with the factors of the learning rate (n, 1, 1)."""
        like = wide[0]
        shapes = tuple((matrix.shape[0], matrix.shape[1]) for matrix in wide)
        if shapes not in self._plans:
            plan = []
            for batch in plan_batches(shapes, padded=pads_matrices(like.device)):
                factors = [0.2 * max(shapes[i]) ** 0.5 for i in batch.members]
                plan.append((batch, like.new_tensor(factors).view(-1, 1, 1)))
            self._plans[shapes] = plan
        return self._plans[shapes]


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[0] > matrix.shape[1]


def _stack_padded(members: Sequence[Tensor], rows: int, columns: int) -> Tensor:
    """Returns ``members`` with zeros beside and below, in the type of the iteration: (n, rows, columns)."""
    device = members[0].device
    padded = torch.zeros(len(members), rows, columns, dtype=iteration_dtype(device.type), device=device)
    torch._foreach_copy_(_without_padding(padded, members), list(members))
    return padded


def _without_padding(padded: Tensor, members: Sequence[Tensor]) -> list[Tensor]:
    """Returns for each of ``members`` the view of its values in ``padded`` (n, rows, columns)."""
    return [matrix[: member.shape[0], : member.shape[1]] for matrix, member in zip(padded, members)]
