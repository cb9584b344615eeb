"""``--weights``: what a run starts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from models.detector import Detector
from models.weights.download import fetch_weights, origin_of_run
from models.weights.load import model_of
from models.weights.read import StoredWeights, read_weights
from models.weights.transfer import transfer_weights
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.files.checkpoint import Origin
from utils.logger import get_logger
from utils.strings import counted


@dataclass(frozen=True)
class StartingWeights:
    """Weights that a new model is filled with."""

    stored: StoredWeights

    @classmethod
    def read(cls, config: TrainConfig, ctx: DistributedContext) -> StartingWeights:
        """Reads the file, after a download if ``--weights`` is a name or an address. Raises UserError for weights that
        cannot be read."""
        return cls(read_weights(fetch_weights(config.weights, ctx=ctx, offline=config.offline)))

    @property
    def model(self) -> dict[str, Any]:
        """The spec of their model."""
        return model_of(self.stored)

    @property
    def origin(self) -> Origin:
        return origin_of_run(self.stored)

    def fill(self, model: Detector, *, grow: bool) -> dict[str, tuple[int, ...]]:
        """Copies what fits into ``model`` and logs what does not. Returns the filled parameters: by name, the rows that
        are still random.

        Args:
            grow: see `transfer_weights`.
        """
        report, log = transfer_weights(model, self.stored, grow=grow), get_logger()
        if model.channels != 3 and self.model.get("channels", 3) == 3:
            channels = counted(model.channels, "channel")
            log.info("%s: its RGB kernels are adapted to images of %s", self.stored.path, channels)
        for line in report.lines():
            log.info("%s", line)
        names = (name for name, _ in model.named_parameters() if name not in report.skipped)
        return {name: report.new_rows.get(name, ()) for name in names}
