"""Our side of the comparisons, see `benchmarks.speed.turns`. Everything is built as train.py and val.py build it."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.speed.turns import BOXES_PER_IMAGE, TimedStep, call_named, rate_of, take_step_turns, take_turns
from utils.process.main import run_main


def step(
    *,
    imgsz: int,
    device: str,
    steps: int,
    threads: int = 0,
    amp: str = "auto",
    optimizer: str = "SGD",
    compile: bool = False,
    is_short: bool = False,
) -> None:
    """Times steps. ``is_short``: those of a run that is too short for cuDNN's search for the fastest kernels."""
    import torch

    from benchmarks.speed.training_step import build_step, make_batches, stepper

    if threads:
        torch.set_num_threads(threads)

    def build(model: str, batch_size: int) -> TimedStep:
        images = 0 if is_short else batch_size
        settings = {"optimizer": optimizer, "amp": amp, "compile": compile}
        take_step = build_step(model, images=images, device=device, **settings)
        batches = make_batches(2, batch_size, imgsz, take_step.ctx.device, BOXES_PER_IMAGE)
        facts = {
            "dtype": str(take_step.amp_dtype or torch.float32).removeprefix("torch."),
            "searched_batch": take_step.settings.benchmark_images,
        }
        return TimedStep(stepper(take_step, batches), facts=facts)

    take_step_turns(build, batches=steps, device="cpu" if device == "cpu" else "cuda")


def loader(
    *,
    data: str,
    imgsz: int,
    batch_size: int,
    workers: int,
    cache: str,
    seconds: float,
    cache_dir: str,
    override: Sequence[str],
) -> None:
    from data.loading.build import build_train_loader, open_train_samples
    from data.read_spec import load_dataset_spec
    from utils.config.recipes import hyperparameters_from
    from utils.config.settings import TrainConfig
    from utils.distributed.context import DistributedContext

    config = TrainConfig(
        imgsz=imgsz, batch_size=batch_size, epochs=1_000_000, cache=cache, cache_dir=cache_dir, workers=workers
    )
    ctx = DistributedContext.single()
    hyp = hyperparameters_from("", override)
    samples = open_train_samples(ctx, config, hyp, load_dataset_spec(data), stride=32)
    batches = iter(build_train_loader(ctx, config, hyp, samples, stride=32))
    take_turns(lambda: {"rate": rate_of((len(b.images) for b in batches), seconds)})


if __name__ == "__main__":
    run_main(lambda _: call_named({"step": step, "loader": loader}))
