"""Our side of the comparisons: a process that is set up once and measures on request (see `benchmarks.turns`).

Everything is built as train.py and val.py build it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.turns import say, take_turns
from utils.entrypoint import run_main

if TYPE_CHECKING:
    from torch import Tensor

BOXES_AN_IMAGE = 12
CONFIDENCE, IOU, MOST = 0.001, 0.7, 300  # of NMS


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.our_side", description=__doc__.split("\n\n")[0])
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
    nms = commands.add_parser("nms")
    nms.add_argument("--input", required=True)
    nms.add_argument("--rule", choices=("ours", "torchvision"), default="ours")
    scan = commands.add_parser("scan")
    scan.add_argument("--data", required=True)
    scan.add_argument("--cache-dir", required=True)
    loader.add_argument("--batch-size", type=int, default=16)
    for command in (step, loader, nms):
        command.add_argument("--imgsz", type=int, default=640)
        command.add_argument("--device", default="cpu")
        command.add_argument("--threads", type=int, default=0)
    options = parser.parse_args(argv)
    {"step": step_turns, "loader": loader_turns, "nms": nms_turns, "scan": scan_once}[options.command](options)


def step_turns(options: argparse.Namespace) -> None:
    """Each turn names what it times, which is built when it is first named. After it the GPU's memory is given back but
    for weights: other sides need it."""
    import torch

    from benchmarks.training_step import build_step, make_batches, stepper

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
    from data.index.dataset_yaml import load_dataset_spec
    from data.loading.build import build_train_loader
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
    looks = describe((b.images, b.targets[:, 2:]) for b in (next(batches) for _ in range(PICTURED)))
    take_turns(lambda: looks | {"rate": rate_of((len(b.images) for b in batches), options.seconds)})


def nms_turns(options: argparse.Namespace) -> None:
    """By ``--rule``: ours on the whole batch, or torchvision's image by image, on the same candidates."""
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cpu" if options.device == "cpu" else f"cuda:{options.device}")
    content = torch.load(options.input, weights_only=True)
    boxes, scores = content["boxes_xyxy"].to(device), content["scores"].to(device)
    rules = {"ours": our_nms, "torchvision": torchvision_nms}
    suppress = partial(rules[options.rule], boxes, scores)
    found = suppress()
    values = {"kept": sum(map(len, found)), "agreement": agreement(our_nms(boxes, scores), found)}
    take_turns(lambda: {"seconds": seconds_of(suppress, 3, device.type)} | values)


def our_nms(boxes: Tensor, scores: Tensor) -> list[Tensor]:
    """Rows (x1, y1, x2, y2, class) of each image."""
    import torch

    from models.postprocess.detections import select_detections

    found = select_detections(boxes, scores, conf_thres=CONFIDENCE, iou_thres=IOU, max_det=MOST, box_voting=False)
    rows = torch.cat([found.boxes_xyxy, found.classes[..., None].to(found.boxes_xyxy)], -1)
    return [image[:count] for image, count in zip(rows, found.counts.tolist())]


def torchvision_nms(boxes: Tensor, scores: Tensor) -> list[Tensor]:
    """Like `our_nms`, with torchvision's kernel."""
    import torch
    from torchvision.ops import batched_nms

    found = []
    for own_boxes, own_scores in zip(boxes, scores):
        box, label = (own_scores > CONFIDENCE).nonzero(as_tuple=True)
        kept = batched_nms(own_boxes[box], own_scores[box, label], label, IOU)[:MOST]
        found.append(torch.cat([own_boxes[box[kept]], label[kept, None].to(own_boxes)], 1))
    return found


def agreement(a: list[Tensor], b: list[Tensor]) -> float:
    """The fraction of boxes and classes of both sides that they have in common."""
    ours, theirs = ([set(map(tuple, image.tolist())) for image in found] for found in (a, b))
    common = sum(len(x & y) for x, y in zip(ours, theirs))
    return common / max(sum(len(x | y) for x, y in zip(ours, theirs)), 1)


def scan_once(options: argparse.Namespace) -> None:
    import resource

    from data.index.dataset_yaml import load_dataset_spec
    from data.index.index import load_index

    spec = load_dataset_spec(options.data)
    started = time.perf_counter()
    index = load_index(spec, "train", cache_dir=options.cache_dir, progress=False)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    say({"seconds": seconds, "images": len(index), "boxes": len(index.classes), "peak_mb": peak})


if __name__ == "__main__":
    run_main(main)
