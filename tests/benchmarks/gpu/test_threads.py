"""Steps with two replicas on one device: slow ones fail, a refusal of torch does not."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks.gpu import threads
from benchmarks.speed.training_step import build_step
from engine.train.step import TrainStep
from tests.benchmarks.gpu.stand_ins import lines_and_failure
from tests.helpers.tiny import TINY_MODEL
from utils.distributed.context import DistributedContext

pytestmark = pytest.mark.benchmarks


class Replicas:
    """`build_step` for `threads.data_parallel`, which notes the number of replicas. ``refusal``: why a module of torch,
    or one of ours, refuses two."""

    def __init__(self, refusal: str = "", file: str = "") -> None:
        self.numbers: list[int] = []
        self.refusal = refusal
        self.file = file

    def build(self, model: dict, *, images: int, ctx: DistributedContext) -> TrainStep:
        self.numbers.append(len(ctx.devices))
        if self.refusal and len(ctx.devices) > 1:
            exec(compile(f"raise RuntimeError({self.refusal!r})", self.file, "exec"))
        step = build_step(model, images=images, classes=3, ctx=ctx)
        assert step.settings.benchmark_images == (images if len(ctx.devices) == 1 else 0)
        return step


OF_TORCH = "/site-packages/torch/nn/parallel/replicate.py"


@pytest.mark.parametrize(
    ("refusal", "limit", "last_line", "failure"),
    [
        ("", 1000, "times the time of a plain step", ""),
        ("", 0, "times the time of a plain step", "times as long as a plain one"),
        ("not twice\nat a", 1000, "the model twice on one device: refused, not twice", ""),
    ],
    ids=["works", "slow", "refused"],
)
def test_data_parallel_is_timed_with_the_model_twice(refusal: str, limit: float, last_line: str, failure: str):
    replicas = Replicas(refusal, OF_TORCH)
    options = Namespace(model=TINY_MODEL, batch_size=2, imgsz=64, device="cpu")
    lines, reason = lines_and_failure(threads.data_parallel(options, build=replicas.build, max_ratio=limit))
    assert replicas.numbers == [1, 2]
    assert lines[-1].endswith(last_line)
    assert reason.endswith(failure)
    assert bool(reason) == bool(failure)


def test_an_error_in_the_replicas_is_no_refusal():
    options = Namespace(model=TINY_MODEL, batch_size=2, imgsz=64, device="cpu")
    with pytest.raises(RuntimeError, match="two devices"):
        list(threads.data_parallel(options, build=Replicas("two devices", "engine/parallel/ddp.py").build))
