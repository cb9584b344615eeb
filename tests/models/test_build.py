from __future__ import annotations

from models.build import build_starting_model
from tests.helpers.messages import refused
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext


def test_layers_without_parameters_are_nothing_to_train():
    config = TrainConfig(model="yolov8n", freeze=[layer for layer in range(23) if layer != 10])  # 10: Upsample
    with refused():
        build_starting_model(DistributedContext.single(), config, ["a"], 3, resumed=None)
