"""The small data set of which loaders are tested."""

from __future__ import annotations

from utils.config.settings import Hyperparameters
from utils.distributed.context import DistributedContext

SIZES = [(60 + 5 * (i % 7), 60 + 7 * (i % 5)) for i in range(22)]
HYP = Hyperparameters(mixup=0.3)
SINGLE = DistributedContext.single("cpu")
