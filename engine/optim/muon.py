"""Muon: momentum with orthogonalized updates (Jordan et al. 2024, kellerjordan.github.io/posts/muon), for matrices and
convolution kernels. torch.optim.Muon supports 2-D parameters only; for those the two agree.

On a GPU, kernel launches and not arithmetic limit the update of a small model. There all parameters of a group are
concatenated into one vector, and matrices of different shapes are padded with zeros to a common shape, which does not
change the others: the 63 matrices of yolov8n, of 29 shapes, become 5 batches (benchmarks/LOG.md, 2026-11-25).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate, combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from engine.optim.model_tensors import dense_format, flatten_as, views_as
from utils.machine.resources import cpu_multiplies_bf16

# The quintic of the reference implementation: steepest at 0, singular values end in about [0.7, 1.2].
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ALIGNMENT = 8  # sides are padded to multiples of this for tensor cores
_BATCH_COST = 2_000_000  # number of values whose iteration takes about as long as the kernel launches of one batch


def pads_matrices(device: torch.device) -> bool:
    """Whether matrices on ``device`` are padded to common shapes."""
    return device.type == "cuda"


@cache
def iteration_dtype(device_type: str) -> torch.dtype:
    """bfloat16, or float32 on a CPU that emulates bfloat16, where its products take ten times as long."""
    return torch.float32 if device_type == "cpu" and not cpu_multiplies_bf16() else torch.bfloat16


def orthogonalize(matrices: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """Maps each of ``matrices`` (n, rows, columns) to about its nearest semi-orthogonal matrix, by Newton-Schulz
    iteration in `iteration_dtype`."""
    x = matrices.to(iteration_dtype(matrices.device.type))
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return (x.mT if tall else x).to(matrices.dtype)


class _Batch(NamedTuple):
    """Matrices that are orthogonalized together."""

    members: list[int]
    rows: int
    columns: int


def plan_batches(shapes: Sequence[tuple[int, int]]) -> list[_Batch]:
    """Groups matrices of ``shapes`` into batches of a common shape with rows <= columns; tall matrices are transposed.
    Repeatedly merges the two batches whose union saves most, as long as the padding costs less than the kernel launches
    of another batch."""

    def cost(batch: _Batch) -> float:
        # The time of the products grows with the rows; below about 512 memory traffic outweighs them.
        return _BATCH_COST + len(batch.members) * batch.rows * batch.columns * (1 + batch.rows / 512)

    def union(a: _Batch, b: _Batch) -> _Batch:
        return _Batch([*a.members, *b.members], max(a.rows, b.rows), max(a.columns, b.columns))

    by_shape = defaultdict(list)
    for number, shape in enumerate(shapes):
        by_shape[tuple(-(-side // _ALIGNMENT) * _ALIGNMENT for side in sorted(shape))].append(number)
    batches = [_Batch(members, *shape) for shape, members in by_shape.items()]
    while len(batches) > 1:
        saving, a, b = max(
            ((cost(a) + cost(b) - cost(union(a, b)), a, b) for a, b in combinations(batches, 2)),
            key=lambda candidate: candidate[0],
        )
        if saving <= 0:
            break
        batches = [batch for batch in batches if batch is not a and batch is not b] + [union(a, b)]
    return batches


class _Plan:
    """Orthogonalizes the matrices of one list of parameters in few batches. ``order``: of the parameters in the vector
    that holds them all."""

    def __init__(self, shapes: Sequence[tuple[int, int]], device: torch.device) -> None:
        batches = plan_batches(shapes)
        self.order = [number for batch in batches for number in batch.members]
        sizes = [[shapes[number][0] * shapes[number][1] for number in batch.members] for batch in batches]
        ends = list(accumulate(map(sum, sizes), initial=0))
        self._parts = [slice(*ends[i : i + 2]) for i in range(len(batches))]  # of the vector
        self._shapes = [(len(batch.members), batch.rows, batch.columns) for batch in batches]
        self._indices = [
            _padding_indices(batch, [shapes[number] for number in batch.members], part.start, ends[-1], device)
            for batch, part in zip(batches, self._parts)
        ]

    def orthogonalize(self, vector: Tensor) -> Tensor:
        """Maps (n + 1,), all matrices in `order` and a zero, to the orthogonal matrices (n,), in bfloat16."""
        vector, results = vector.bfloat16(), []
        for part, shape, indices in zip(self._parts, self._shapes, self._indices):
            matrices = vector[part] if indices is None else vector.index_select(0, indices[0])
            values = orthogonalize(matrices.view(shape)).reshape(-1)
            results.append(values if indices is None else values.index_select(0, indices[1]))
        return torch.cat(results)


def _padding_indices(
    batch: _Batch, shapes: Sequence[tuple[int, int]], start: int, zero: int, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Returns for each padded value its index in the vector, and for each value of the vector its index among the
    padded ones; None if nothing is padded.

    Args:
        shapes: of the batch's members, which follow each other in the vector.
        start: index of the first member's first value.
        zero: index of a zero.
    """
    if set(shapes) == {(batch.rows, batch.columns)}:
        return None
    source = torch.full((len(shapes), batch.rows, batch.columns), zero, dtype=torch.int32, device=device)
    slots = torch.arange(source.numel(), dtype=torch.int32, device=device).view(source.shape)
    target = []
    for slot, (rows, columns) in enumerate(shapes):
        matrix = torch.arange(start, start + rows * columns, dtype=torch.int32, device=device).view(rows, columns)
        inside = (slot, slice(min(rows, columns)), slice(max(rows, columns)))
        is_tall = rows > columns
        source[inside] = matrix.mT if is_tall else matrix
        target.append((slots[inside].mT if is_tall else slots[inside]).reshape(-1))
        start += rows * columns
    return source.view(-1), torch.cat(target)


def as_matrix(tensor: Tensor) -> Tensor:
    """Flattens a tensor to (first dimension, product of the others); copies only kernels that are not channels_last."""
    return (tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor).flatten(1)


def unflatten(matrix: Tensor, like: Tensor) -> Tensor:
    """A view of ``matrix`` in the shape of ``like``; undoes `as_matrix`."""
    if like.dim() != 4:
        return matrix.view(like.shape)
    a, b, c, d = like.shape
    return matrix.view(a, c, d, b).permute(0, 3, 1, 2)


def _vector(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor:
    """Copies all values and a zero into a vector (n + 1,), each tensor in the memory order of its counterpart."""
    return torch.cat([*flatten_as(tensors, like), tensors[0].new_zeros(1)])


def _size_factor(rows: int, columns: int) -> float:
    """Gives an orthogonal update the size of AdamW's (Liu et al. 2025, arXiv 2502.16982)."""
    return 0.2 * max(rows, columns) ** 0.5


class Muon(Optimizer):
    """Muon for parameters of two or more dimensions, each viewed as a matrix (first, product of the others).

    Columns are in memory order, since their order does not affect the result. The learning rate is scaled by
    ``0.2 * sqrt(max(rows, columns))``: updates then have the size of AdamW's, whose learning rates and weight decay
    carry over. Matrices of equal or transposed shape are orthogonalized in one batch; on a GPU, of similar shapes too.

    Attributes:
        found_inf: if set, a float tensor () on the device; 1 makes the next steps no-ops without a host sync.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, momentum: float = 0.95, weight_decay: float = 0.0, nesterov: bool = True
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults)
        self.found_inf: Tensor | None = None
        self._plans: dict[tuple, _Plan] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for number, group in enumerate(self.param_groups):
            alike = defaultdict(list)
            for parameter in group["params"]:
                alike[(parameter.dtype, parameter.device)].append(parameter)
            for (dtype, device), parameters in alike.items():
                trained = [parameter for parameter in parameters if parameter.grad is not None]
                if not trained:
                    continue
                if pads_matrices(device) and all(map(dense_format, parameters)):
                    self._update_as_vector(parameters, group, (number, dtype, device))
                else:
                    self._update(trained, group)

    def _momenta(self, parameters: list[Tensor]) -> list[Tensor]:
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return [self.state[parameter]["momentum_buffer"] for parameter in parameters]

    def _bad(self, parameters: list[Tensor]) -> tuple[Tensor | None, float | Tensor]:
        """Returns whether the step must change nothing, bool () or None (never), and the factor 0 or 1 for that."""
        if self.found_inf is None:
            return None, 1.0
        bad = self.found_inf.to(parameters[0].device).bool()
        return bad, 1 - bad.to(parameters[0].dtype)

    def _update(self, parameters: list[Tensor], group: dict) -> None:
        """Updates parameters without padding, and without copies beyond those that batches need."""
        buffers, gradients = self._momenta(parameters), [parameter.grad for parameter in parameters]
        bad, keep = self._bad(parameters)
        if bad is not None:  # the momentum then does not change
            gradients = [torch.where(bad, buffer, gradient) for buffer, gradient in zip(buffers, gradients)]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, buffers, group["momentum"]) if group["nesterov"] else buffers
        moves = self._orthogonalize([as_matrix(update) for update in updates], keep * group["lr"])
        self._move(parameters, [unflatten(move, p) for move, p in zip(moves, parameters)], group, keep)

    def _update_as_vector(self, parameters: list[Tensor], group: dict, key: tuple) -> None:
        """Like `_update`, in few kernels: all ``parameters`` form one vector, including those without a gradient, which
        do not change. ``key`` identifies the list of parameters."""
        shapes = [(len(parameter), parameter.numel() // len(parameter)) for parameter in parameters]
        if key not in self._plans:
            self._plans[key] = _Plan(shapes, parameters[0].device)
        plan = self._plans[key]
        parameters, shapes = [parameters[n] for n in plan.order], [shapes[n] for n in plan.order]
        buffers = self._momenta(parameters)
        gradients = [buffer if p.grad is None else p.grad for p, buffer in zip(parameters, buffers)]
        momentum, gradient = _vector(buffers, parameters), _vector(gradients, parameters)
        bad, keep = self._bad(parameters)
        if bad is not None:
            gradient = torch.where(bad, momentum, gradient)
        momentum.lerp_(gradient, 1 - group["momentum"])
        torch._foreach_copy_(buffers, views_as(momentum, parameters))
        update = gradient.lerp_(momentum, group["momentum"]) if group["nesterov"] else momentum
        moves = views_as(plan.orthogonalize(update).to(update.dtype).mul_(keep * group["lr"]), parameters)
        torch._foreach_mul_(moves, [_size_factor(*shape) for shape in shapes])
        moved = [(p, move) for p, move in zip(parameters, moves) if p.grad is not None]
        self._move([p for p, _ in moved], [move for _, move in moved], group, keep)

    @staticmethod
    def _move(parameters: list[Tensor], moves: list[Tensor], group: dict, keep: float | Tensor) -> None:
        torch._foreach_mul_(parameters, 1 - keep * (group["lr"] * group["weight_decay"]))
        torch._foreach_sub_(parameters, moves)

    def _orthogonalize(self, matrices: list[Tensor], rate: float | Tensor) -> list[Tensor]:
        """Returns the orthogonalized matrices, times ``rate`` and the factor of their shape."""
        is_tall = [matrix.shape[0] > matrix.shape[1] for matrix in matrices]
        by_shape = defaultdict(list)
        for index, (matrix, tall) in enumerate(zip(matrices, is_tall)):
            by_shape[matrix.mT.shape if tall else matrix.shape].append(index)
        moves = list(matrices)
        for shape, members in by_shape.items():
            batch = torch.stack([matrices[i].mT if is_tall[i] else matrices[i] for i in members])
            for i, move in zip(members, orthogonalize(batch) * (rate * _size_factor(*shape))):
                moves[i] = move.mT if is_tall[i] else move
        return moves
