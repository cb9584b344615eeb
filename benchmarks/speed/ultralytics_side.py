"""The peer's side of the comparisons. It runs in an environment that has Ultralytics and uses its public interfaces as
its trainer does by default. See `benchmarks.speed.turns`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os

os.environ["YOLO_OFFLINE"] = "1"

from turns import rate_of, seconds_of, take_turns  # next to this file, which is started by its path

BOXES_AN_IMAGE = 12


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    step = commands.add_parser("step")
    step.add_argument("--steps", type=int, default=4)
    loader = commands.add_parser("loader")
    loader.add_argument("--data", required=True)
    loader.add_argument("--workers", type=int, default=2)
    loader.add_argument("--cache", default="none")
    loader.add_argument("--seconds", type=float, default=6.0)
    train = commands.add_parser("train")
    train.add_argument("--data", required=True)
    train.add_argument("--model", required=True)
    train.add_argument("--workers", type=int, default=2)
    train.add_argument("--epochs", type=int, default=2)
    train.add_argument("--cache", default="none")
    train.add_argument("--no-val", action="store_true")
    train.add_argument("--project", required=True)
    train.add_argument("--set", nargs="*", default=[], help="further settings as key=number")
    for command in (step, loader, train):
        command.add_argument("--imgsz", type=int, default=640)
        command.add_argument("--batch-size", type=int, default=16)
        command.add_argument("--device", default="cpu")
        command.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("ultralytics").setLevel(logging.ERROR)
    actions = {"step": step_turns, "loader": loader_turns, "train": train_one}
    actions[options.command](options)


def step_turns(options: argparse.Namespace) -> None:
    """As in `benchmarks.speed.our_side`."""
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cpu" if options.device == "cpu" else f"cuda:{options.device}")
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.backends.cudnn.benchmark = True
    built = {}

    def measure(model: str, batch_size: int) -> dict:
        key = (model, batch_size)
        try:
            if key not in built:
                built[key] = build_step(model, batch_size, options.imgsz, device)
                for _ in range(3):
                    built[key]()
            if on_gpu:
                built[key]()
            return {"seconds": seconds_of(built[key], options.steps, device.type)}
        except torch.OutOfMemoryError as error:
            built.pop(key, None)
            return {"error": str(error).splitlines()[0]}
        finally:
            torch.cuda.empty_cache()

    take_turns(measure)


def build_step(name: str, images: int, size: int, device):
    """A function that takes a step with the optimizer SGD."""
    import torch
    from ultralytics.nn.tasks import DetectionModel
    from ultralytics.utils import DEFAULT_CFG
    from ultralytics.utils.torch_utils import ModelEMA

    on_gpu, boxes = device.type == "cuda", BOXES_AN_IMAGE
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, 3, size, size), generator=generator, dtype=torch.uint8)
    pixels = pixels.pin_memory() if on_gpu else pixels
    targets = {
        "batch_idx": torch.arange(images).repeat_interleave(boxes).float(),
        "cls": torch.randint(0, 3, (images * boxes, 1), generator=generator).float(),
        "bboxes": torch.rand(images * boxes, 4, generator=generator) * 0.3 + 0.2,
    }
    model = DetectionModel(name, nc=80, verbose=False).to(device)
    model.args = DEFAULT_CFG
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.937, nesterov=True)
    scaler, ema = torch.amp.GradScaler(device.type, enabled=on_gpu), ModelEMA(model)

    def one_step() -> None:
        batch = {k: v.to(device, non_blocking=on_gpu) for k, v in targets.items()}
        batch["img"] = pixels.to(device, non_blocking=on_gpu).float() / 255
        with torch.autocast(device.type, torch.float16 if on_gpu else None, enabled=on_gpu):
            loss, _ = model(batch)
        scaler.scale(loss.sum()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        ema.update(model)

    return one_step


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


def train_one(options: argparse.Namespace) -> None:
    """A training by the peer's own trainer."""
    from ultralytics import YOLO

    model = YOLO(options.model)
    further = {key: json.loads(value) for key, value in (item.split("=") for item in options.set)}
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


if __name__ == "__main__":
    main()
