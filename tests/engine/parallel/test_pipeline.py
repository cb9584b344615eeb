"""Two processes that share the layers of a model train as one process does."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from engine.run.sources import freeze_layers
from models.detector import build_detector
from tests.helpers.ranks import run_ranks
from tests.helpers.repository import ROOT
from tests.helpers.same_content import assert_same_content
from tests.helpers.scripts import SMALL, run_python
from tests.helpers.steps import make_train_step
from tests.helpers.tiny import TINY_ANCHOR_MODEL, TINY_MODEL, make_batch, write_dataset, write_model
from utils.distributed.context import DistributedContext
from utils.files.torch_file import read_checkpoint

SINGLE = DistributedContext.single()
WHOLE = [(0, 6)]
UNEQUAL = [(0, 2), (2, 5), (5, 5), (5, 6)]  # the third has no images
HALVES = [[(0, 1), (3, 4)], [(1, 3), (4, 6)]]  # micro-batches of two copies, three images each
# The head takes layers 0, 1 and 3, wherever the model is split.
SKIPPING = {
    "nc": 2,
    "backbone": [[-1, 1, "Conv", [8, 3, 4]], [-1, 1, "Conv", [8, 3, 2]], [-1, 2, "C2f", [16, True]]],
    "head": [
        [-1, 1, "Conv", [16, 3, 2]],
        [-1, 1, "nn.Upsample", [None, 2, "nearest"]],
        [[-1, 1], 1, "Concat", [1]],
        [[0, 5, 3], 1, "Detect", ["nc"]],
    ],
}
UNUSED = SKIPPING | {"head": [*SKIPPING["head"][:-1], [1, 1, "Conv", [8, 3, 2]], SKIPPING["head"][-1]]}
# A model, the bounds of its micro-batches, and settings of `train`.
CASES = {
    "one micro-batch": (SKIPPING, WHOLE, {}),
    "anchors": (TINY_ANCHOR_MODEL, UNEQUAL, {"dtype": torch.float32}),
    "frozen": (SKIPPING, UNEQUAL, {"freeze": [0, 1, 2]}),
    "fp16": (TINY_MODEL, WHOLE, {"dtype": torch.float32, "amp_dtype": torch.float16}),
    "two heads": (TINY_MODEL | {"end2end": True}, UNEQUAL, {}),
    "a layer that no output depends on": (UNUSED, UNEQUAL, {}),
}


def train(ctx, model, bounds, *, counts=(), updates=3, dtype=torch.float64, freeze=(), **settings):
    """Returns the weights, their averages and the statistics after some steps; losses and norms of the gradients.

    Args:
        bounds: of this process's micro-batches, of six images.
        counts: images of each over all processes.
    """
    model = build_detector(model, 2, seed=1).to(dtype, memory_format=torch.channels_last)
    freeze_layers(model, freeze)
    step = make_train_step(ctx, model, pipeline=ctx.is_distributed, **settings)
    for update in range(1, updates + 1):
        step([make_batch(6).shard(*ends) for ends in bounds], counts or [end - start for start, end in bounds], update)
    values = [(*v.losses, v.grad_norm, v.finite) for v in step.reader.pop(leave=0)]
    ema = {f"ema.{name}": tensor for name, tensor in step.ema.module.state_dict().items()}
    return {name: tensor.clone() for name, tensor in (model.state_dict() | ema).items()}, values


def _train_cases(ctx, cases):
    return [train(ctx, model, bounds, **settings) for model, bounds, settings in cases]


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple]:
    """What each of two processes has trained, by case. One pair trains all, because its start takes longer."""
    return dict(zip(CASES, zip(*run_ranks(2, _train_cases, list(CASES.values())))))


@pytest.mark.parametrize("case", CASES)
def test_two_processes_end_with_the_bits_of_one(pairs, case):
    """Losses, gradients, weights and statistics, of one micro-batch or of four, one smaller and one empty: a sum with
    zeros does not round."""
    model, bounds, settings = CASES[case]
    expected, values = train(SINGLE, model, bounds, **settings)
    assert any(finite for *_, finite in values)
    for actual, actual_values in pairs[case]:
        assert actual_values == values
        assert_same_content(actual, expected)


def _train_half(ctx):
    return train(ctx, SKIPPING, HALVES[ctx.rank // 2], counts=[3, 3], updates=1)


def test_four_processes_are_two_copies():
    """Together they are one process with the micro-batches of both. Running statistics are the mean over the copies."""
    first, *others = run_ranks(4, _train_half)
    both = [half[number] for number in (0, 1) for half in HALVES]
    expected, values = train(SINGLE, SKIPPING, both, updates=1)
    alone = [train(SINGLE, SKIPPING, half, updates=1)[0] for half in HALVES]
    assert first[1] == [pytest.approx(steps, rel=1e-9) for steps in values]
    for name, tensor in expected.items():
        if "running" in name:
            tensor = (alone[0][name] + alone[1][name]) / 2
        if "num_batches" not in name:
            torch.testing.assert_close(first[0][name], tensor, rtol=1e-9, atol=1e-9)
    for other in others:
        assert_same_content(other[0], first[0])


def _saved_bytes(ctx, model) -> int:
    """Returns the bytes of the activations that autograd keeps during a step."""
    model = build_detector(model, 2, seed=1)
    weights = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    step = make_train_step(ctx, model, pipeline=ctx.is_distributed)
    saved: dict[int, torch.UntypedStorage] = {}  # by address; held, so that no address is used again

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step([make_batch(1, size=128)], [1], 1)
    return sum(storage.nbytes() for address, storage in saved.items() if address not in weights)


def test_each_process_keeps_about_half_of_the_activations():
    model = "yolov8n"
    whole = _saved_bytes(SINGLE, model)
    for part in run_ranks(2, _saved_bytes, model):
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
    run(*flags, *pair, "--name", "two", "--callbacks", "user_kill:Kill", code=2)
    last = tmp_path / "runs" / "two" / "last.pt"
    assert 0 < read_checkpoint(last)["progress"]["updates"] < 4
    run("--resume", str(last), "--callbacks", "", "--spawn", "2")
    assert_same_content(read_checkpoint(last), read_checkpoint(tmp_path / "runs" / "one" / "last.pt"))
