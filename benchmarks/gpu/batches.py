"""Checks that batches arrive on the device as the loader renders them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.speed.training_step import context_of
from data.dataset.yaml_file import load_dataset_spec
from data.loading.build import build_train_loader, open_train_samples
from data.loading.prefetcher import Prefetcher
from utils.batches import Batch
from utils.config.recipes import hyperparameters_from
from utils.config.settings import TrainConfig

BATCHES = 40
BURNS = 4  # large matrix products before each copy, which give workers time to overwrite memory that is not kept


def compare_batches(*, device: str, data: str, imgsz: int, batch_size: int) -> Iterator[str]:
    """Yields how many batches arrived as rendered, and how many of them were pinned."""
    ctx = context_of(device)
    config = TrainConfig(imgsz=imgsz, batch_size=batch_size, epochs=1000, workers=4)
    hyp = hyperparameters_from("")
    samples = open_train_samples(ctx, config, hyp, load_dataset_spec(data), stride=32)
    loader = build_train_loader(ctx, config, hyp, samples, stride=32)
    pinned = 0
    side = 16 if device == "cpu" else 4096
    weights = torch.rand(side, side, device=ctx.device)

    def batches() -> Iterator[Batch]:
        nonlocal pinned
        for batch in loader:
            pinned += batch.images.is_pinned()
            with torch.cuda.stream(prefetcher._stream):  # which copies the batch
                for _ in range(BURNS):
                    torch.mm(weights, weights)
            yield batch

    prefetcher = Prefetcher(batches(), device=ctx.device)
    for number in range(BATCHES):
        images = next(prefetcher).images.cpu()
        prefetcher.prefetch(2)
        if not torch.equal(images, loader.render(*divmod(number, len(loader))).images):
            yield f"! batch {number} is not what was drawn"
            break
    else:
        yield f"{BATCHES} batches arrived as drawn; {pinned} were in page-locked memory"
    loader.close()
    if device != "cpu" and not pinned:
        yield "! no batch was in page-locked memory"
