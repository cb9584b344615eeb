"""Two processes that share the layers of a model train as one process does."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
from torch import nn

from tests.engine.parallel.pipeline_steps import SKIPPING, UNEQUAL, WHOLE, make_step, shards
from tests.helpers.ranks import run_ranks
from tests.helpers.repository import ROOT
from tests.helpers.same_content import assert_same_content
from tests.helpers.scripts import SMALL, run_python
from tests.helpers.tiny import TINY_ANCHOR_MODEL, TINY_MODEL, make_batch, write_dataset, write_model
from utils.distributed.context import DistributedContext
from utils.files.torch_file import read_checkpoint

SINGLE = DistributedContext.single()


def train(
    ctx, model, bounds, *, pipeline: bool = False, counts=(), updates: int = 3, **settings
) -> tuple[dict[str, torch.Tensor], list[tuple[float, ...]]]:
    """Returns the weights, their averages and the statistics after some steps; losses and norms of the gradients.

    Args:
        bounds: of this process's micro-batches.
        counts: images of each over all processes.
    """
    step, model = make_step(ctx, model, pipeline=pipeline, **settings)
    for update in range(1, updates + 1):
        step(shards(bounds), counts or [end - start for start, end in bounds], update)
    values = [(*v.losses, v.grad_norm, v.finite) for v in step.reader.pop(leave=0)]
    ema = {f"ema.{name}": tensor for name, tensor in step.ema.module.state_dict().items()}
    return {name: tensor.clone() for name, tensor in (model.state_dict() | ema).items()}, values


# A model, the bounds of its micro-batches, and settings of `train`.
CASES = {
    "one micro-batch": (TINY_MODEL, WHOLE, {}),
    "float64": (TINY_MODEL, UNEQUAL, {}),
    "anchors": (TINY_ANCHOR_MODEL, UNEQUAL, {"dtype": torch.float32}),
    "skips": (SKIPPING, WHOLE, {}),
    "frozen": (SKIPPING, UNEQUAL, {"freeze": [0, 1, 2]}),
    "yolov5n": ("yolov5n", UNEQUAL, {"dtype": torch.float32}),
    "bf16": (TINY_MODEL, UNEQUAL, {"dtype": torch.float32, "amp_dtype": torch.bfloat16}),
    "fp16": (TINY_MODEL, WHOLE, {"dtype": torch.float32, "amp_dtype": torch.float16}),
}


def _shares(ctx, cases):
    return [train(ctx, model, bounds, pipeline=True, **settings) for model, bounds, settings in cases]


@pytest.fixture(scope="module")
def shares() -> dict[str, tuple]:
    """What each of two processes has trained, by case. One pair trains all, because its start takes longer."""
    return dict(zip(CASES, zip(*run_ranks(2, _shares, list(CASES.values())))))


def check_shares(shares, model, bounds, settings) -> None:
    expected, values = train(SINGLE, model, bounds, **settings)
    assert any(finite for *_, finite in values)
    assert not all(torch.equal(expected[name], expected[f"ema.{name}"]) for name in expected if name[:4] != "ema.")
    assert len(shares) == 2
    for actual, actual_values in shares:
        assert actual_values == values
        assert_same_content(actual, expected)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_end_with_the_bits_of_one(shares, case):
    """Losses, gradients, weights and statistics, of one micro-batch or of four, one smaller and one empty: a sum with
    zeros does not round."""
    check_shares(shares[case], *CASES[case])


@pytest.mark.slow
def test_two_processes_end_with_the_bits_of_one_with_two_heads():
    case = ("yolo26n", UNEQUAL, {"freeze": [0, 2]})
    check_shares([share for (share,) in run_ranks(2, _shares, [case])], *case)


HALVES = [[(0, 1), (3, 4)], [(1, 3), (4, 6)]]  # micro-batches of two copies, three images each


def _shares_of_copy(ctx, model, counts_of_updates):
    half = HALVES[ctx.rank // 2]
    return [train(ctx, model, half, pipeline=True, counts=[3, 3], updates=updates) for updates in counts_of_updates]


def test_four_processes_are_two_copies():
    """Together they are one process with the micro-batches of both. Running statistics are the mean over the copies."""
    both = [HALVES[copy][number] for number in (0, 1) for copy in (0, 1)]
    counts_of_updates = (1, 3)
    shares = run_ranks(4, _shares_of_copy, SKIPPING, counts_of_updates)
    for updates, (first, *others) in zip(counts_of_updates, zip(*shares), strict=True):
        expected, values = train(SINGLE, SKIPPING, both, updates=updates)
        alone = [train(SINGLE, SKIPPING, half, updates=updates)[0] for half in HALVES]
        assert first[1] == [pytest.approx(steps, rel=1e-9) for steps in values]
        for name in expected.keys() - {name for name in expected if "num_batches" in name}:
            if "running" not in name:
                torch.testing.assert_close(first[0][name], expected[name], rtol=1e-9, atol=1e-9)
            elif updates == 1:
                mean = (alone[0][name] + alone[1][name]) / 2
                torch.testing.assert_close(first[0][name], mean, rtol=1e-9, atol=1e-9)
        for other in others:
            assert_same_content(other[0], first[0])


class _Saved:
    """Bytes of activations that autograd keeps, now and at most; each storage counts once."""

    def __init__(self, model: nn.Module) -> None:
        self.now = self.most = 0
        self._live = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        size = storage.nbytes()
        if address not in self._live:
            self._live.add(address)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(tensor, self._freed, address, size)
        return tensor

    def _freed(self, address: int, size: int) -> None:
        self._live.discard(address)
        self.now -= size


def _most_saved(ctx, model) -> int:
    step, model = make_step(ctx, model, pipeline=ctx.is_distributed, dtype=torch.float32)
    saved = _Saved(model)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        step([make_batch(1, size=128) for _ in range(3)], [1, 1, 1], 1)
    assert saved.now == 0
    return saved.most


@pytest.mark.parametrize("model", ["yolov8n", "yolov5n"])
def test_each_process_keeps_at_most_0_65_of_the_activations(model):
    whole = _most_saved(SINGLE, model)
    for part in run_ranks(2, _most_saved, model):
        assert 0.35 * whole < part < 0.65 * whole


@pytest.mark.slow
def test_a_killed_run_resumes_and_ends_with_the_bits_of_one_process(tmp_path):
    """Ten images in batches of four, of which two make a step: the last step of an epoch has one batch, of two images.
    Sizes vary from batch to batch."""
    write_dataset(tmp_path / "set")
    (tmp_path / "user_kill.py").write_text(
        "import os\n\nclass Kill:\n    def on_step(self, state):\n"
        "        if state.rank == 1 and state.step == 3:\n            os.kill(os.getpid(), 9)\n"
    )
    model = write_model(tmp_path / "model.yaml", SKIPPING)
    flags = [*SMALL, "--data", "set/data.yaml", "--model", str(model), "--nominal-batch", "8", "--multi-scale"]
    flags += ["--epochs", "2", "--threads", "1", "--save-minutes", "1e-6", "--project", "runs"]

    run = partial(run_python, ROOT / "train.py", folder=tmp_path)
    run(*flags, "--name", "one")
    pair = ["--spawn", "2", "--pipeline", "2"]
    done = run(*flags, *pair, "--name", "two", "--callbacks", "user_kill:Kill", code=2)
    assert "process 1 of 2" in done.stderr
    last = tmp_path / "runs" / "two" / "last.pt"
    assert 0 < read_checkpoint(last)["progress"]["updates"] < 4
    run("--resume", str(last), "--callbacks", "", "--spawn", "2")
    assert_same_content(read_checkpoint(last), read_checkpoint(tmp_path / "runs" / "one" / "last.pt"))
