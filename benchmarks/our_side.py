"""Our side of the comparisons: a process that is set up once and measures when told to (see `benchmarks.turns`).

What it measures is built as train.py and val.py build it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

from benchmarks.turns import say, take_turns
from utils.cli import run_main

BOXES_AN_IMAGE = 12


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    step = commands.add_parser("step")
    step.add_argument("--model", required=True)
    step.add_argument("--amp", default="auto")
    step.add_argument("--optimizer", default="SGD")
    step.add_argument("--compile", action="store_true")
    step.add_argument("--steps", type=int, default=4)
    loader = commands.add_parser("loader")
    loader.add_argument("--data", required=True)
    loader.add_argument("--workers", type=int, default=2)
    loader.add_argument("--cache", default="none")
    loader.add_argument("--cache-dir", default="")
    loader.add_argument("--seconds", type=float, default=6.0)
    loader.add_argument("--set", nargs="*", default=[], dest="override")
    nms = commands.add_parser("nms")
    nms.add_argument("--input", required=True)
    scan = commands.add_parser("scan")
    scan.add_argument("--data", required=True)
    scan.add_argument("--cache-dir", required=True)
    for command in (step, loader, nms):
        command.add_argument("--imgsz", type=int, default=640)
        command.add_argument("--batch-size", type=int, default=16)
        command.add_argument("--device", default="cpu")
        command.add_argument("--threads", type=int, default=0)
    options = parser.parse_args(argv)
    {"step": step_turns, "loader": loader_turns, "nms": nms_turns, "scan": scan_once}[options.command](options)


def step_turns(options: argparse.Namespace) -> None:
    import torch

    from benchmarks.training_step import build_step, make_batches

    if options.threads:
        torch.set_num_threads(options.threads)
    take_step = build_step(
        options.model,
        device=options.device,
        amp=options.amp,
        optimizer=options.optimizer,
        compiled_for=options.batch_size if options.compile else 0,
    )
    batches = make_batches(2, options.batch_size, options.imgsz, take_step.ctx.device, BOXES_AN_IMAGE)
    taken = 0

    def one_step() -> None:
        nonlocal taken
        taken += 1
        take_step([batches[taken % 2]], [options.batch_size], taken)
        take_step.reader.pop()

    for _ in range(3):
        one_step()
    dtype = str(take_step.amp_dtype or torch.float32).removeprefix("torch.")
    take_turns(lambda: {"seconds": seconds_of(one_step, options.steps, take_step.ctx.device.type), "dtype": dtype})


def seconds_of(action: Callable[[], None], times: int, device: str) -> float:
    """Median seconds of ``action``; on a GPU, where it only queues work, the mean over all of them."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(times):
            action()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / times
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def loader_turns(options: argparse.Namespace) -> None:
    from benchmarks.pictures import PICTURED, describe, rate_of
    from data.dataset_yaml import load_dataset_spec
    from data.loader import create_dataloader
    from utils.config import hyperparameters_from
    from utils.distributed import DistributedContext

    loader, _ = create_dataloader(
        load_dataset_spec(options.data),
        "train",
        ctx=DistributedContext.single(),
        imgsz=options.imgsz,
        batch_size=options.batch_size,
        hyp=hyperparameters_from("", options.override),
        augment=True,
        epochs=1_000_000,
        cache=options.cache,
        cache_dir=options.cache_dir,
        workers=options.workers,
    )
    batches = iter(loader)
    looks = describe((b.images, b.targets[:, 2:]) for b in (next(batches) for _ in range(PICTURED)))
    take_turns(lambda: looks | {"rate": rate_of((len(b.images) for b in batches), options.seconds)})


def nms_turns(options: argparse.Namespace) -> None:
    import torch

    from models.postprocess import non_max_suppression

    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cpu" if options.device == "cpu" else f"cuda:{options.device}")
    content = torch.load(options.input, weights_only=True)
    boxes, scores = content["boxes_xyxy"].to(device), content["scores"].to(device)
    kept = 0

    def suppress() -> None:
        nonlocal kept
        found = non_max_suppression(boxes, scores, conf_thres=0.001, iou_thres=0.7, max_det=300)
        kept = int(found.counts.sum())

    suppress()
    take_turns(lambda: {"seconds": seconds_of(suppress, 3, device.type), "kept": kept})


def scan_once(options: argparse.Namespace) -> None:
    import resource

    from data.dataset_yaml import load_dataset_spec
    from data.index import load_index

    spec = load_dataset_spec(options.data)
    started = time.perf_counter()
    index = load_index(spec, "train", cache_dir=options.cache_dir, progress=False)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    say({"seconds": seconds, "images": len(index), "boxes": len(index.classes), "peak_mb": peak})


if __name__ == "__main__":
    run_main(main)
