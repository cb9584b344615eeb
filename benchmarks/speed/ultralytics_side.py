"""The peer's side of the comparisons. It runs in an environment that has Ultralytics and uses the public interfaces as
Ultralytics' trainer does by default. See `benchmarks.speed.turns`.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

# Next to this file, which is started by its path.
from turns import BOXES_PER_IMAGE, TimedStep, call_named, rate_of, take_step_turns, take_turns

if TYPE_CHECKING:
    import torch

NOMINAL_BATCH = 64  # ``nbs``: its trainer updates the weights once in about this many images


def prepare_import() -> None:
    """Prepares a quiet import of Ultralytics, without network, and without polars, which bare machines lack.

    The wheels of polars are 50 MB; training needs it only to read its table of results at the end, and works without
    it."""
    os.environ["YOLO_OFFLINE"] = "1"
    if importlib.util.find_spec("polars") is None:
        sys.modules.setdefault("polars", types.ModuleType("polars"))
    logging.getLogger("ultralytics").setLevel(logging.ERROR)


def step(*, imgsz: int, device: str, steps: int, threads: int) -> None:
    """Times weight updates, each of one or several batches."""
    import torch
    from ultralytics.utils.torch_utils import init_seeds

    if threads:
        torch.set_num_threads(threads)
    init_seeds(0, deterministic=True)  # its trainer's default; it does not set cudnn.benchmark
    on = torch.device("cpu" if device == "cpu" else f"cuda:{device}")

    def build(model: str, batch_size: int) -> TimedStep:
        batches = batches_per_update(batch_size)
        update = build_update(f"{model}.yaml", batch_size, imgsz, on)
        return TimedStep(update, batches, facts={"batches_per_update": batches})

    take_step_turns(build, batches=steps, device=on.type)


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


def loader(*, data: str, imgsz: int, batch_size: int, workers: int, cache: str, seconds: float) -> None:
    from ultralytics.cfg import get_cfg
    from ultralytics.data import build_dataloader, build_yolo_dataset
    from ultralytics.data.utils import check_det_dataset
    from ultralytics.utils import DEFAULT_CFG

    overrides = {"imgsz": imgsz, "cache": cache_of(cache), "workers": workers, "batch": batch_size}
    settings = get_cfg(DEFAULT_CFG, overrides)
    content = check_det_dataset(data)
    dataset = build_yolo_dataset(settings, content["train"], batch_size, content, mode="train", rect=False, stride=32)
    batch_loader = build_dataloader(dataset, batch_size, workers, shuffle=True, rank=-1)

    def endless():
        while True:
            yield from batch_loader

    batches = endless()
    names = ("mosaic", "degrees", "translate", "scale", "shear", "perspective", "fliplr", "flipud", "mixup")
    names += ("hsv_h", "hsv_s", "hsv_v")
    augmentation = {"settings": {name: getattr(settings, name) for name in names}}
    take_turns(lambda: augmentation | {"rate": rate_of((len(b["img"]) for b in batches), seconds)})


def cache_of(name: str) -> str | bool:
    return False if name == "none" else name


def train(
    *, data: str, model: str, imgsz: int, batch_size: int, device: str = "cpu", cache: str = "none", **further: Any
) -> None:
    """Trains with the peer's own trainer. ``further``: its settings."""
    from ultralytics import YOLO
    from ultralytics.engine import trainer

    # The same result as its own check, which downloads a model on GPUs.
    trainer.check_amp = lambda model: next(model.parameters()).is_cuda
    settings = {"data": data, "imgsz": imgsz, "batch": batch_size, "device": device, "cache": cache_of(cache)}
    YOLO(model).train(**settings, val=False, plots=False, pretrained=model.endswith(".pt"), **further)


def validate(*, weights: str, data: str, imgsz: int, batch_size: int, device: str = "cpu", **further: Any) -> None:
    """Validates with the peer's own validator, and writes ``project``/``name``/predictions.json. ``further``: settings
    of it."""
    from ultralytics import YOLO

    settings = {"data": data, "imgsz": imgsz, "batch": batch_size, "device": device}
    YOLO(weights).val(**settings, exist_ok=True, save_json=True, plots=False, **further)


if __name__ == "__main__":
    prepare_import()
    call_named({"step": step, "loader": loader, "train": train, "validate": validate})
