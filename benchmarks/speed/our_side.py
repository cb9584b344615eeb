"""Our side of the comparisons: a process that is set up once and measures on request (see `benchmarks.speed.turns`).

Everything is built as train.py and val.py build it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.speed.turns import rate_of, seconds_of, take_turns
from utils.entrypoint import run_main

BOXES_AN_IMAGE = 12


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.speed.our_side", description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    step = commands.add_parser("step")
    step.add_argument("--amp", default="auto")
    step.add_argument("--compile", action="store_true")
    step.add_argument("--steps", type=int, default=4)
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
        command.add_argument("--threads", type=int, default=0)
    options = parser.parse_args(argv)
    {"step": step_turns, "loader": loader_turns}[options.command](options)


def step_turns(options: argparse.Namespace) -> None:
    """Each turn names what it times, which is built when it is first named. After it the GPU's memory is given back but
    for weights: other sides need it."""
    import torch

    from benchmarks.speed.training_step import build_step, make_batches, stepper

    if options.threads:
        torch.set_num_threads(options.threads)
    built: dict[tuple, tuple] = {}

    def build(model: str, batch_size: int, optimizer: str) -> tuple:
        compiled_for = batch_size if options.compile else 0
        settings = {"device": options.device, "amp": options.amp, "optimizer": optimizer, "compiled_for": compiled_for}
        take_step = build_step(model, **settings)
        device = take_step.ctx.device
        one_step = stepper(take_step, make_batches(2, batch_size, options.imgsz, device, BOXES_AN_IMAGE))
        for _ in range(3):
            one_step()
        return one_step, device, str(take_step.amp_dtype or torch.float32).removeprefix("torch.")

    def measure(model: str, batch_size: int, optimizer: str) -> dict:
        key = (model, batch_size, optimizer)
        try:
            if key not in built:
                built[key] = build(*key)
            one_step, device, dtype = built[key]
            if device.type == "cuda":
                one_step()  # takes memory again
            return {"seconds": seconds_of(one_step, options.steps, device.type), "dtype": dtype}
        except torch.OutOfMemoryError as error:
            built.pop(key, None)
            return {"error": str(error).splitlines()[0]}
        finally:
            torch.cuda.empty_cache()

    take_turns(measure)


def loader_turns(options: argparse.Namespace) -> None:
    from data.loading.build import build_train_loader
    from data.spec.dataset_yaml import load_dataset_spec
    from utils.config.parser import hyperparameters_from
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
    loader = build_train_loader(
        DistributedContext.single(),
        config,
        hyperparameters_from("", options.override),
        load_dataset_spec(options.data),
        stride=32,
    )
    batches = iter(loader)
    take_turns(lambda: {"rate": rate_of((len(b.images) for b in batches), options.seconds)})


if __name__ == "__main__":
    run_main(main)
