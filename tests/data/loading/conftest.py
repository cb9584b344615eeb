"""Loaders of one small data set."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from data.loading.build import (
    build_run_val_loader,
    build_train_loader,
    build_val_loader,
    open_run_val_reader,
    open_train_samples,
)
from data.render.letterbox import CanvasRule
from data.samples.readers import ImageReader
from tests.data.loading.small_loader import HYP, SINGLE, SIZES
from tests.helpers.synthetic_index import write_rectangles
from utils.config.settings import TrainConfig


@pytest.fixture(scope="package")
def index(tmp_path_factory):
    return write_rectangles(tmp_path_factory.mktemp("images"), SIZES, objects=3)


@pytest.fixture
def open_loader(index, monkeypatch):
    monkeypatch.setattr("data.loading.build.load_split", lambda *args, **kwargs: SimpleNamespace(used=index))

    class Spec:
        source = "synthetic.yaml"
        tile = 0

    def build(*, ctx=SINGLE, training=True, squares=False, config=TrainConfig, hyp=HYP, start=None, **options):
        own = {"epochs": 20} if config is TrainConfig else {"weights": []}
        config = config(**({"imgsz": 64, "batch_size": 8, "workers": 0} | own | options))
        if not training:
            canvases = CanvasRule(config.imgsz, 32, squares)
            if isinstance(config, TrainConfig):
                return build_run_val_loader(ctx, config, open_run_val_reader(ctx, config, hyp, Spec()), canvases)
            reader = ImageReader(index, imgsz=config.imgsz, antialias=False)
            return build_val_loader(ctx, reader, canvases, batch_size=config.batch_size, workers=config.workers)
        samples = open_train_samples(ctx, config, hyp, Spec(), stride=32)
        loader = build_train_loader(ctx, config, hyp, samples, stride=32)
        if start:
            loader.start_at(*start)
        return loader

    return build
