"""The cost of virtual ranks: steps with 4 of them on 2 processes, compared with plain DDP with 2 accumulated
micro-batches.

    python -m benchmarks.virtual_ranks_cost --model yolov8n --imgsz 320

Both process the same global batch in the same processes and alternate. Prints the medians of the steps and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from utils.distributed.context import DistributedContext
from utils.distributed.spawn import spawn


def build(ctx: DistributedContext, model: str, virtual_ranks: int, amp: torch.dtype | None):
    from engine.optim.build import build_optimizer
    from engine.optim.ema import ModelEma
    from engine.parallel.ddp import parallelize
    from engine.train.step import TrainStep
    from models.detector import build_detector
    from utils.config.settings import Hyperparameters

    detector = build_detector(model, 80).to(ctx.device, memory_format=torch.channels_last)
    return TrainStep(
        model=detector if virtual_ranks else parallelize(detector, ctx),
        criterion=detector.head.build_loss(Hyperparameters()).to(ctx.device),
        optimizer=build_optimizer(detector, "SGD", lr=0.01, momentum=0.9, weight_decay=5e-4),
        ema=ModelEma(detector, decay=0.99, tau=10),
        ctx=ctx,
        amp_dtype=amp,
        clip_norm=10.0,
        channels_last=True,
        virtual_ranks=virtual_ranks,
    )


def measure(model: str, imgsz: int, batch_size: int, rounds: int, bf16: bool, out: str) -> None:
    from tests.helpers.tiny import make_batch

    torch.set_num_threads(1)
    ctx = DistributedContext.from_environment("cpu")
    amp = torch.bfloat16 if bf16 else None
    share = batch_size // ctx.world_size
    whole = make_batch(batch_size, size=imgsz, targets_per_image=8).shard(ctx.rank * share, (ctx.rank + 1) * share)
    halves = [whole.shard(0, share // 2), whole.shard(share // 2, share)]
    plain, exact = build(ctx, model, 0, amp), build(ctx, model, 4, amp)
    steps = {
        "plain DDP, 2 accumulated": lambda n: plain(halves, [batch_size // 2] * 2, n),
        "4 virtual ranks": lambda n: exact([whole], [batch_size], n),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 2):
        for name, step in steps.items():
            dist.barrier()
            started = time.perf_counter()
            step(number + 1)
            dist.barrier()
            if number >= 2:
                seconds[name].append(time.perf_counter() - started)
    if ctx.is_main:
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        lines = [f"{name}: {value * 1000:.0f} ms" for name, value in medians.items()]
        ratio = medians["4 virtual ranks"] / medians["plain DDP, 2 accumulated"]
        text = f"{model} {imgsz} px, batch {batch_size}, {'bf16' if bf16 else 'float32'}, 2 processes of 1 thread: "
        Path(out).write_text(text + ", ".join(lines) + f", ratio {ratio:.3f}")
    ctx.close()


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser("python -m benchmarks.virtual_ranks_cost", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="yolov8n")
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder, "result"))
        arguments = (options.model, options.imgsz, options.batch_size, options.rounds, options.bf16, out)
        spawn(measure, 2, arguments)
        print(Path(out).read_text())


if __name__ == "__main__":
    main()
