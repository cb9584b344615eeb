"""The peer's side of the comparisons. It runs in an environment that has Ultralytics and uses the public interfaces as
Ultralytics' trainer does by default. See `benchmarks.speed.turns`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING

# Next to this file, which is started by its path.
from turns import BOXES_PER_IMAGE, StepTimer, TimedStep, rate_of, take_turns

if TYPE_CHECKING:
    import torch

NOMINAL_BATCH = 64  # ``nbs``: its trainer updates the weights once in about this many images


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    step = commands.add_parser("step")
    step.add_argument("--steps", type=int, default=4)
    step.add_argument("--threads", type=int, default=0)
    loader = commands.add_parser("loader")
    loader.add_argument("--data", required=True)
    loader.add_argument("--workers", type=int, default=2)
    loader.add_argument("--cache", default="none")
    loader.add_argument("--seconds", type=float, default=6.0)
    training = commands.add_parser("train")
    training.add_argument("--data", required=True)
    training.add_argument("--model", required=True)
    training.add_argument("--workers", type=int, default=2)
    training.add_argument("--epochs", type=int, default=2)
    training.add_argument("--cache", default="none")
    training.add_argument("--no-val", action="store_true")
    training.add_argument("--project", required=True)
    training.add_argument("--set", nargs="*", default=[], help="further settings: key=JSON")
    validation = commands.add_parser("val")
    validation.add_argument("--weights", required=True)
    validation.add_argument("--data", required=True)
    validation.add_argument("--split", default="val")
    validation.add_argument("--workers", type=int, default=2)
    validation.add_argument("--project", required=True)
    validation.add_argument("--name", required=True)
    for command in (step, loader, training, validation):
        command.add_argument("--imgsz", type=int, default=640)
        command.add_argument("--batch-size", type=int, default=16)
        command.add_argument("--device", default="cpu")
    options = parser.parse_args()
    prepare_import()
    actions = {"step": step_turns, "loader": loader_turns, "train": train, "val": validate}
    actions[options.command](options)


def prepare_import() -> None:
    """Prepares a quiet import of Ultralytics, without network, and without polars and psutil, which bare machines lack.

    The wheels of polars are 50 MB; training needs it only to read its table of results at the end, and works without
    it. psutil is used only to query the free memory before caching images."""
    os.environ["YOLO_OFFLINE"] = "1"
    if importlib.util.find_spec("polars") is None:
        sys.modules.setdefault("polars", types.ModuleType("polars"))
    if importlib.util.find_spec("psutil") is None:
        psutil = types.ModuleType("psutil")
        psutil.virtual_memory = _virtual_memory
        sys.modules.setdefault("psutil", psutil)
    logging.getLogger("ultralytics").setLevel(logging.ERROR)


def _virtual_memory() -> types.SimpleNamespace:
    """Replaces `psutil.virtual_memory`: returns bytes of memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    available = os.sysconf("SC_AVPHYS_PAGES") * page
    return types.SimpleNamespace(total=total, available=available, percent=100 * (1 - available / total))


def step_turns(options: argparse.Namespace) -> None:
    """Times weight updates (`StepTimer`), each of one or several batches."""
    import torch
    from ultralytics.utils.torch_utils import init_seeds

    if options.threads:
        torch.set_num_threads(options.threads)
    init_seeds(0, deterministic=True)  # its trainer's default; it does not set cudnn.benchmark
    device = torch.device("cpu" if options.device == "cpu" else f"cuda:{options.device}")

    def build(model: str, batch_size: int) -> TimedStep:
        batches = batches_per_update(batch_size)
        update = build_update(model, batch_size, options.imgsz, device)
        return TimedStep(update, batches, facts={"batches_per_update": batches})

    take_turns(StepTimer(build, batches=options.steps, device=device.type).measure)


def batches_per_update(images: int) -> int:
    """Returns the number of batches of ``images`` images after which the peer's trainer updates the weights."""
    return max(round(NOMINAL_BATCH / images), 1)


def build_update(name: str, images: int, size: int, device: torch.device) -> Callable[[], None]:
    """Returns a function that processes the batches of one weight update as the peer's trainer does: in float16 and
    channels last on a GPU. The optimizer is SGD."""
    import torch
    from ultralytics.nn.tasks import DetectionModel
    from ultralytics.utils import DEFAULT_CFG
    from ultralytics.utils.torch_utils import ModelEMA

    on_gpu = device.type == "cuda"
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, 3, size, size), generator=generator, dtype=torch.uint8)
    if on_gpu:
        pixels = pixels.pin_memory()
    boxes = images * BOXES_PER_IMAGE
    targets = {
        "batch_idx": torch.arange(images).repeat_interleave(BOXES_PER_IMAGE).float(),
        "cls": torch.randint(0, 3, (boxes, 1), generator=generator).float(),
        "bboxes": torch.rand(boxes, 4, generator=generator) * 0.3 + 0.2,
    }
    layout = torch.channels_last if on_gpu else torch.contiguous_format
    model = DetectionModel(name, nc=80, verbose=False).to(device, memory_format=layout)
    model.args = DEFAULT_CFG
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.937, nesterov=True)
    scaler = torch.amp.GradScaler(device.type, enabled=on_gpu)
    ema = ModelEMA(model)

    def add_gradients() -> None:
        batch = {name: values.to(device, non_blocking=on_gpu) for name, values in targets.items()}
        batch["img"] = pixels.to(device, non_blocking=on_gpu).float() / 255
        with torch.autocast(device.type, torch.float16 if on_gpu else None, enabled=on_gpu):
            loss, _ = model(batch)
        scaler.scale(loss.sum()).backward()

    def update() -> None:
        for _ in range(batches_per_update(images)):
            add_gradients()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        ema.update(model)

    return update


def loader_turns(options: argparse.Namespace) -> None:
    from ultralytics.cfg import get_cfg
    from ultralytics.data import build_dataloader, build_yolo_dataset
    from ultralytics.data.utils import check_det_dataset
    from ultralytics.utils import DEFAULT_CFG

    cache = False if options.cache == "none" else options.cache
    overrides = {"imgsz": options.imgsz, "cache": cache, "workers": options.workers, "batch": options.batch_size}
    settings = get_cfg(DEFAULT_CFG, overrides)
    data = check_det_dataset(options.data)
    dataset = build_yolo_dataset(settings, data["train"], options.batch_size, data, mode="train", rect=False, stride=32)
    loader = build_dataloader(dataset, options.batch_size, options.workers, shuffle=True, rank=-1)

    def endless():
        while True:
            yield from loader

    batches = endless()
    names = ("mosaic", "degrees", "translate", "scale", "shear", "perspective", "fliplr", "flipud", "mixup")
    names += ("hsv_h", "hsv_s", "hsv_v")
    augmentation = {"settings": {name: getattr(settings, name) for name in names}}
    take_turns(lambda: augmentation | {"rate": rate_of((len(b["img"]) for b in batches), options.seconds)})


def train(options: argparse.Namespace) -> None:
    """Trains with the peer's own trainer."""
    from ultralytics import YOLO
    from ultralytics.engine import trainer

    trainer.check_amp = lambda model: True  # would download a model to compare float16 with float32
    model = YOLO(options.model)
    further = {key: json.loads(value) for key, value in (item.split("=", 1) for item in options.set)}
    model.train(
        data=options.data,
        imgsz=options.imgsz,
        batch=options.batch_size,
        workers=options.workers,
        device=options.device,
        epochs=options.epochs,
        cache=False if options.cache == "none" else options.cache,
        val=not options.no_val,
        project=options.project,
        plots=False,
        pretrained=options.model.endswith(".pt"),
        **further,
    )


def validate(options: argparse.Namespace) -> None:
    """Validates with the peer's own validator, and writes ``project``/``name``/predictions.json."""
    from ultralytics import YOLO

    YOLO(options.weights).val(
        data=options.data,
        split=options.split,
        imgsz=options.imgsz,
        batch=options.batch_size,
        workers=options.workers,
        device=options.device,
        project=options.project,
        name=options.name,
        exist_ok=True,
        save_json=True,
        plots=False,
    )


if __name__ == "__main__":
    main()
