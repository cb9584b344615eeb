"""Muon: momentum whose update is orthogonalised (Jordan et al. 2024, kellerjordan.github.io/posts/muon), for matrices
and convolution kernels. torch.optim.Muon takes 2-D parameters only; on those the two agree.

On a GPU the update of a small model is bound by kernel launches, not by arithmetic. There all parameters of a group are
one vector, and matrices of several shapes are padded with zeros to a common one, so that few batches are iterated:
zero rows and columns stay zero, and the rest is what it is without them. On a CPU nothing is padded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, combinations
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from utils.flat_tensors import dense_format, flatten_as, views_as

# The quintic of the reference implementation: steepest at 0, singular values end in about [0.7, 1.2].
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ALIGNMENT = 8  # tensor cores want sides that are multiples of this
_BATCH_COST = 2_000_000  # padded values whose iteration takes about as long as launching the kernels of one batch more


def pads_matrices(device: torch.device) -> bool:
    """Whether matrices on ``device`` are padded to common shapes."""
    return device.type == "cuda"


def orthogonalise(matrices: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrix of each of (n, rows, columns), in bfloat16."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return (x.mT if tall else x).to(matrices.dtype)


class _Batch(NamedTuple):
    """Matrices that are orthogonalised together."""

    members: list[int]
    rows: int
    columns: int


def plan_batches(shapes: Sequence[tuple[int, int]]) -> list[_Batch]:
    """Which matrices of ``shapes`` are padded to which common shape, rows <= columns; tall ones are transposed.

    Beginning with a batch for each shape, the two whose union saves most are united, as long as what is padded costs
    less than launching the kernels of another batch.
    """

    def cost(batch: _Batch) -> float:
        # The time of the products grows with the rows; below about 512 memory traffic outweighs them.
        return _BATCH_COST + len(batch.members) * batch.rows * batch.columns * (1 + batch.rows / 512)

    def united(a: _Batch, b: _Batch) -> _Batch:
        return _Batch([*a.members, *b.members], max(a.rows, b.rows), max(a.columns, b.columns))

    by_shape = defaultdict(list)
    for number, shape in enumerate(shapes):
        by_shape[tuple(-(-side // _ALIGNMENT) * _ALIGNMENT for side in sorted(shape))].append(number)
    batches = [_Batch(members, *shape) for shape, members in by_shape.items()]
    while len(batches) > 1:
        saving, a, b = max(
            ((cost(a) + cost(b) - cost(united(a, b)), a, b) for a, b in combinations(batches, 2)),
            key=lambda candidate: candidate[0],
        )
        if saving <= 0:
            break
        batches = [batch for batch in batches if batch is not a and batch is not b] + [united(a, b)]
    return batches


class _PaddedBatch:
    """The matrices of a batch, gathered from a vector of all matrices and scattered back.

    Args:
        batch: whose members lie in the vector one after another, in their order.
        shapes: of all matrices.
        start: of the first member in the vector.
        zero: where the vector has a zero.
    """

    def __init__(
        self, batch: _Batch, shapes: Sequence[tuple[int, int]], start: int, zero: int, device: torch.device
    ) -> None:
        self._shape = (len(batch.members), batch.rows, batch.columns)
        wanted = dict.fromkeys(shapes[number] for number in batch.members)
        sizes = [shapes[number][0] * shapes[number][1] for number in batch.members]
        self._end = start + sum(sizes)
        self._start, self._source, self._target = start, None, None
        if list(wanted) == [(batch.rows, batch.columns)]:
            return  # nothing is padded
        source = torch.full(self._shape, zero, dtype=torch.int32, device=device)
        target = []
        slots = torch.arange(source.numel(), dtype=torch.int32, device=device).view(self._shape)
        numbers = torch.arange(start, self._end, dtype=torch.int32, device=device)
        for slot, (number, values) in enumerate(zip(batch.members, numbers.split(sizes))):
            rows, columns = shapes[number]
            is_tall = rows > columns
            inside = (slot, slice(min(rows, columns)), slice(max(rows, columns)))
            matrix = values.view(rows, columns)
            source[inside] = matrix.mT if is_tall else matrix
            target.append((slots[inside].mT if is_tall else slots[inside]).reshape(-1))
        self._source, self._target = source.view(-1), torch.cat(target)

    def take(self, vector: Tensor) -> Tensor:
        """The padded matrices (n, rows, columns)."""
        if self._source is None:
            return vector[self._start : self._end].view(self._shape)
        return vector.index_select(0, self._source).view(self._shape)

    def give(self, matrices: Tensor) -> Tensor:
        """The members' values (1-D), undoing `take`."""
        values = matrices.reshape(-1)
        return values if self._target is None else values.index_select(0, self._target)


class _Plan:
    """How the matrices of one list of parameters are orthogonalised in few batches.

    ``order``: of the parameters in the vector of all of them.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], device: torch.device) -> None:
        batches = plan_batches(shapes)
        self.order = [number for batch in batches for number in batch.members]
        sizes = [sum(shapes[number][0] * shapes[number][1] for number in batch.members) for batch in batches]
        starts = [0, *accumulate(sizes)]
        self._batches = [_PaddedBatch(b, shapes, start, starts[-1], device) for b, start in zip(batches, starts)]

    def orthogonal(self, vector: Tensor) -> Tensor:
        """Of ``vector`` (n + 1,), all matrices in `order` and a zero, the orthogonal ones (n,), in bfloat16."""
        vector = vector.bfloat16()
        return torch.cat([batch.give(orthogonalise(batch.take(vector))) for batch in self._batches])


def as_matrix(tensor: Tensor) -> Tensor:
    """(first, product of the others): a view, unless a kernel has another memory order than channels_last."""
    return (tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor).flatten(1)


def unflatten(matrix: Tensor, like: Tensor) -> Tensor:
    """A view of ``matrix`` in the shape of ``like``; undoes `as_matrix`."""
    if like.dim() != 4:
        return matrix.view(like.shape)
    a, b, c, d = like.shape
    return matrix.view(a, c, d, b).permute(0, 3, 1, 2)


def _matrix_shape(tensor: Tensor) -> tuple[int, int]:
    return tensor.shape[0], tensor.numel() // tensor.shape[0]


def _vector(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor:
    """A copy (n + 1,) of all values and a zero, each tensor's as its counterpart in ``like`` has them in memory."""
    return torch.cat([*flatten_as(tensors, like), tensors[0].new_zeros(1)])


def _size_factor(rows: int, columns: int) -> float:
    """Gives an orthogonal update the size of AdamW's (Liu et al. 2025, arXiv 2502.16982)."""
    return 0.2 * max(rows, columns) ** 0.5


class Muon(Optimizer):
    """Muon over parameters of two or more dimensions, each seen as (first, product of the others), the others in the
    order of its memory: the order of columns changes nothing but which copies are needed.

    The rate is scaled by ``0.2 * sqrt(max(rows, columns))`` so that updates have AdamW's size and its learning rates
    and weight decay carry over. Matrices of one shape, or its transpose, are orthogonalised in one batch; on a GPU
    those of similar shapes too.

    ``found_inf``, a float tensor of 0 or 1 on the device, makes a step a no-op without a host sync.
    """

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.0, nesterov: bool = True):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults)
        self.found_inf: Tensor | None = None
        self._plans: dict[tuple, _Plan] = {}

    @torch.no_grad()
    def step(self, closure=None) -> None:
        if closure is not None:
            raise ValueError("closures are not supported")
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
        """Whether the step is to change nothing, bool (), and 0 if so, else 1."""
        if self.found_inf is None:
            return None, 1.0
        bad = self.found_inf.to(parameters[0].device).bool()
        return bad, 1 - bad.to(parameters[0].dtype)

    def _update(self, parameters: list[Tensor], group: dict) -> None:
        """Parameter by parameter, nothing padded or copied beyond need."""
        buffers, gradients = self._momenta(parameters), [parameter.grad for parameter in parameters]
        bad, keep = self._bad(parameters)
        if bad is not None:  # Momentum then stays as it is.
            gradients = [torch.where(bad, buffer, gradient) for buffer, gradient in zip(buffers, gradients)]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, buffers, group["momentum"]) if group["nesterov"] else buffers
        moves = self._orthogonal([as_matrix(update) for update in updates], keep * group["lr"])
        self._move(parameters, [unflatten(move, p) for move, p in zip(moves, parameters)], group, keep)

    def _update_as_vector(self, parameters: list[Tensor], group: dict, key: tuple) -> None:
        """As `_update` in few kernels: all ``parameters`` as one vector, also those without a gradient, which stay as
        they are. ``key`` tells lists of parameters apart."""
        shapes = [_matrix_shape(parameter) for parameter in parameters]
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
        moves = views_as(plan.orthogonal(update).to(update.dtype).mul_(keep * group["lr"]), parameters)
        torch._foreach_mul_(moves, [_size_factor(*shape) for shape in shapes])
        moved = [(p, move) for p, move in zip(parameters, moves) if p.grad is not None]
        self._move([p for p, _ in moved], [move for _, move in moved], group, keep)

    @staticmethod
    def _move(parameters: list[Tensor], moves: list[Tensor], group: dict, keep: float | Tensor) -> None:
        torch._foreach_mul_(parameters, 1 - keep * (group["lr"] * group["weight_decay"]))
        torch._foreach_sub_(parameters, moves)

    def _orthogonal(self, matrices: list[Tensor], rate: float | Tensor) -> list[Tensor]:
        """Of each matrix the orthogonal one, times ``rate`` and the factor of its shape."""
        is_tall = [matrix.shape[0] > matrix.shape[1] for matrix in matrices]
        by_shape = defaultdict(list)
        for index, (matrix, tall) in enumerate(zip(matrices, is_tall)):
            by_shape[matrix.mT.shape if tall else matrix.shape].append(index)
        moves = list(matrices)
        for shape, members in by_shape.items():
            batch = torch.stack([matrices[i].mT if is_tall[i] else matrices[i] for i in members])
            for i, move in zip(members, orthogonalise(batch) * (rate * _size_factor(*shape))):
                moves[i] = move.mT if is_tall[i] else move
        return moves
