"""Our side of the comparisons: a process that is set up once and measures on request (see `benchmarks.speed.turns`).

Everything is built as train.py and val.py build it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.speed.turns import BOXES_PER_IMAGE, StepTimer, TimedStep, rate_of, take_turns
from utils.process.main import run_main

if TYPE_CHECKING:
    from engine.train.step import TrainStep


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.speed.our_side", description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    step = commands.add_parser("step")
    step.add_argument("--amp", default="auto")
    step.add_argument("--compile", action="store_true")
    step.add_argument("--steps", type=int, default=4)
    step.add_argument("--threads", type=int, default=0)
    step.add_argument("--short-run", action="store_true", help="without cuDNN's search for the fastest kernels")
    loader = commands.add_parser("loader")
    loader.add_argument("--data", required=True)
    loader.add_argument("--workers", type=int, default=2)
    loader.add_argument("--cache", default="none")
    loader.add_argument("--cache-dir", default="")
    loader.add_argument("--seconds", type=float, default=6.0)
    loader.add_argument("--set", nargs="*", default=[], dest="override")
    loader.add_argument("--batch-size", type=int, default=16)
    for command in (step, loader):
        command.add_argument("--imgsz", type=int, default=640)
        command.add_argument("--device", default="cpu")
    options = parser.parse_args(argv)
    {"step": step_turns, "loader": loader_turns}[options.command](options)


def step_turns(options: argparse.Namespace) -> None:
    """Times steps (`StepTimer`)."""
    import torch

    from benchmarks.speed.training_step import make_batches, stepper

    if options.threads:
        torch.set_num_threads(options.threads)

    def build(model: str, batch_size: int, optimizer: str) -> TimedStep:
        take_step = build_timed_step(options, model, batch_size, optimizer)
        batches = make_batches(2, batch_size, options.imgsz, take_step.ctx.device, BOXES_PER_IMAGE)
        dtype = str(take_step.amp_dtype or torch.float32).removeprefix("torch.")
        return TimedStep(stepper(take_step, batches), facts={"dtype": dtype})

    device = "cpu" if options.device == "cpu" else "cuda"
    take_turns(StepTimer(build, batches=options.steps, device=device).measure)


def build_timed_step(options: argparse.Namespace, model: str, batch_size: int, optimizer: str) -> TrainStep:
    from benchmarks.speed.training_step import build_step

    return build_step(
        model,
        images=0 if options.short_run else batch_size,
        device=options.device,
        optimizer=optimizer,
        amp=options.amp,
        compile=options.compile,
    )


def loader_turns(options: argparse.Namespace) -> None:
    from data.dataset.yaml_file import load_dataset_spec
    from data.loading.build import build_train_loader, open_train_samples
    from utils.config.recipes import hyperparameters_from
    from utils.config.settings import TrainConfig
    from utils.distributed.context import DistributedContext

    config = TrainConfig(
        imgsz=options.imgsz,
        batch_size=options.batch_size,
        epochs=1_000_000,
        cache=options.cache,
        cache_dir=options.cache_dir,
        workers=options.workers,
    )
    ctx = DistributedContext.single()
    hyp = hyperparameters_from("", options.override)
    samples = open_train_samples(ctx, config, hyp, load_dataset_spec(options.data), stride=32)
    batches = iter(build_train_loader(ctx, config, hyp, samples, stride=32))
    take_turns(lambda: {"rate": rate_of((len(b.images) for b in batches), options.seconds)})


if __name__ == "__main__":
    run_main(main)
