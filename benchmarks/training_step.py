"""A training step with pictures that are already in memory: what several benchmarks time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from engine.step import TrainStep
    from utils.structures import Batch


def build_step(
    model: str | dict,
    *,
    device: str = "cpu",
    amp: str = "auto",
    optimizer: str = "SGD",
    compiled_for: int = 0,
    classes: int = 80,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> TrainStep:
    """The step of train.py with its default settings, on one device: "cpu" or a CUDA number.

    ``compiled_for``: pictures of a whole batch, 0 for a step that is not compiled. ``wrap`` may put the model into
    DataParallel or the like.
    """
    import torch

    from engine.compilation import plan_compilation
    from engine.ema import ModelEma
    from engine.optim import build_optimizer
    from engine.precision import resolve_amp
    from engine.step import TrainStep
    from models.detector import build_detector
    from models.losses import build_criterion
    from utils.config import TrainConfig, hyperparameters_from
    from utils.distributed import DistributedContext

    ctx = DistributedContext.single("cpu" if device == "cpu" else f"cuda:{device}")
    if ctx.device.type == "cuda":
        torch.backends.cudnn.benchmark = True
    hyp = hyperparameters_from("")
    detector = build_detector(model, classes).to(ctx.device, memory_format=torch.channels_last)
    rule = build_optimizer(
        detector, optimizer, lr=1e-4, momentum=hyp.momentum, weight_decay=hyp.weight_decay, sharded=False
    )
    for group in rule.param_groups:
        group.setdefault("initial_lr", group["lr"])
    ema = ModelEma(detector, decay=hyp.ema_decay, tau=hyp.ema_tau)
    criterion = build_criterion(detector, hyp).to(ctx.device)
    compilation = plan_compilation(TrainConfig(compile=compiled_for > 0), ctx, pictures=compiled_for, shares=1)
    compilation.apply(detector, criterion)
    return TrainStep(
        model=wrap(detector),
        criterion=criterion,
        optimizer=rule,
        ema=ema,
        ctx=ctx,
        amp_dtype=resolve_amp(amp, ctx.device),
        clip_norm=hyp.clip_norm,
        channels_last=True,
        compilation=compilation,
    )


def make_batches(count: int, images: int, size: int, device, boxes: int = 12) -> list[Batch]:
    """Random pictures with ``boxes`` boxes each, as the loader hands them over (page-locked where there is a GPU)."""
    import torch

    from utils.structures import Batch, bucketed

    batches = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        pixels = torch.randint(0, 256, (images, size, size, 3), generator=generator, dtype=torch.uint8)
        targets = torch.zeros(images * boxes, 6)
        targets[:, 0] = torch.arange(images).repeat_interleave(boxes)
        targets[:, 1] = torch.randint(0, 3, (images * boxes,), generator=generator)
        targets[:, 2:] = torch.rand(images * boxes, 4, generator=generator) * 0.3 + 0.2
        batch = Batch(
            images=pixels.permute(0, 3, 1, 2),
            targets=targets,
            max_targets=bucketed(boxes),
            indices=torch.arange(images),
            original_hw=torch.full((images, 2), size, dtype=torch.int32),
            letterbox=torch.tensor([[1.0, 1.0, 0.0, 0.0]]).expand(images, 4).clone(),
            paths=tuple(f"{i}.png" for i in range(images)),
        )
        batches.append(batch.pin_memory() if device.type == "cuda" else batch)
    return batches
