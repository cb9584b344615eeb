"""A model of how a step scales over processes, compared with a measurement of two gloo ranks.

    python -m benchmarks.scaling --model yolov8n --imgsz 320 --batch-size 16
    python -m benchmarks.scaling --step-ms 40 --backward-share 0.6 --gradient-mb 12     # figures of another machine

Each process computes for T seconds, the fraction b of it in the backward pass; then G bytes of gradients are summed. A
ring sends them in 2 (N - 1) pieces of G / N bytes each, every piece at the speed of the slowest link, B bytes per
second, after a delay of L seconds:

    R(N) = 2 (N - 1) (G / (N B) + L)

DDP sends a bucket as soon as its gradients are ready, so all but the last bucket, the fraction c of G, overlaps with
the rest of the backward pass:

    T(N) = T + max(R(N) - (1 - c) b T, c R(N))          efficiency = T / T(N)
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.report import append_log

BUCKET_MB = 25.0  # DDP's default, after a first one of 1 MB


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.scaling", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="yolov8n")
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--batch-size", type=int, default=8, help="of one rank")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--step-ms", type=float, default=0.0, help="T, measured elsewhere; 0: measure two ranks here")
    parser.add_argument("--backward-share", type=float, default=0.6, help="b, with --step-ms")
    parser.add_argument("--gradient-mb", type=float, default=12.0, help="G, with --step-ms")
    parser.add_argument("--node-gbs", type=float, default=300.0, help="B within a machine of 8 GPUs, GB/s")
    parser.add_argument("--network-gbs", type=float, default=40.0, help="B between machines, GB/s for each GPU")
    parser.add_argument("--delay-us", type=float, default=10.0, help="L between GPUs")
    parser.add_argument("--log", action="store_true", help="append a dated row to benchmarks/README.md")
    options = parser.parse_args()
    lines = []
    if options.step_ms:
        step, share, size = options.step_ms / 1000, options.backward_share, options.gradient_mb * 1e6
    else:
        step, share, size, line = measured(options)
        lines.append(line)
    for processes, bandwidth in ((8, options.node_gbs), (64, options.network_gbs)):
        predicted = step_seconds(step, share, size, processes, bandwidth * 1e9, options.delay_us * 1e-6)
        lines.append(
            f"{processes} GPUs of that step at {bandwidth:g} GB/s: {predicted * 1000:.1f} ms, "
            f"efficiency {step / predicted:.1%}"
        )
    text = "; ".join(lines)
    print(text)
    if options.log:
        append_log(f"Scaling: {text}.")


def ring_seconds(size: float, processes: int, bandwidth: float, delay: float) -> float:
    """R: summing ``size`` bytes over a ring."""
    return 2 * (processes - 1) * (size / (processes * bandwidth) + delay)


def step_seconds(
    step: float, backward_share: float, size: float, processes: int, bandwidth: float, delay: float
) -> float:
    """T(N) of the module's formula."""
    if processes == 1:
        return step
    ring = ring_seconds(size, processes, bandwidth, delay)
    last = 1 / max(1, math.ceil(size / (BUCKET_MB * 1e6)))
    return step + max(ring - (1 - last) * backward_share * step, last * ring)


def measured(options: argparse.Namespace) -> tuple[float, float, float, str]:
    """T, b, G, and a line that sets the formula for two ranks beside two gloo ranks of one thread each."""
    import torch

    from utils.distributed.spawn import spawn

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.pt")
        spawn(_rank, 2, (options.model, options.imgsz, options.batch_size, options.rounds, str(out)))
        found = torch.load(out, weights_only=True)
    alone, together, share, size = (found[k] for k in ("alone", "together", "backward_share", "size"))
    delay = found["small"] / 2
    bandwidth = size / max(found["large"] - 2 * delay, 1e-9)
    predicted = step_seconds(alone, share, size, 2, bandwidth, delay)
    line = (
        f"{options.model} {options.imgsz} px, {options.batch_size} images a rank, {size / 1e6:.1f} MB of gradients, "
        f"two gloo ranks of one thread: {alone * 1000:.0f} ms without communication ({share:.0%} backwards), "
        f"{together * 1000:.0f} ms with, the formula says {predicted * 1000:.0f} ms"
    )
    return alone, share, size, line


def _rank(model: str, imgsz: int, batch_size: int, rounds: int, out: str) -> None:
    import torch
    import torch.distributed as dist

    from benchmarks.training_step import make_batches
    from engine.parallel.ddp import parallelize
    from models.detector import build_detector
    from utils.config.settings import Hyperparameters
    from utils.distributed.context import DistributedContext

    torch.set_num_threads(1)
    ctx = DistributedContext.from_environment("cpu")
    detector = build_detector(model, 80).to(memory_format=torch.channels_last)
    criterion = detector.head.build_loss(Hyperparameters())
    ddp = parallelize(detector, ctx)
    (batch,) = make_batches(1, batch_size, imgsz, ctx.device)
    images = batch.images.to(memory_format=torch.channels_last).float() / 255
    seconds: dict[str, list[float]] = {"alone": [], "together": [], "backward": []}

    def step(name: str, forward) -> None:
        dist.barrier()
        started = time.perf_counter()
        total = criterion(forward(images), batch.targets, batch.max_targets).total
        middle = time.perf_counter()
        total.backward()
        ended = time.perf_counter()
        seconds[name].append(ended - started)
        if name == "alone":
            seconds["backward"].append(ended - middle)
        ddp.zero_grad()

    for _ in range(rounds + 2):
        with ddp.no_sync():
            step("alone", ddp)
        step("together", ddp)
    size = 4.0 * sum(p.numel() for p in detector.parameters())
    median = {name: statistics.median(values[2:]) for name, values in seconds.items()}
    found = {
        "alone": median["alone"],
        "together": median["together"],
        "backward_share": median["backward"] / median["alone"],
        "size": size,
        "large": _all_reduce_seconds(int(size // 4)),
        "small": _all_reduce_seconds(1),
    }
    if ctx.is_main:
        torch.save(found, out)
    ctx.close()


def _all_reduce_seconds(numbers: int) -> float:
    import torch
    import torch.distributed as dist

    values, seconds = torch.zeros(numbers), []
    for _ in range(7):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(values)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
