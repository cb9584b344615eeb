from __future__ import annotations

from torch import nn

from models.modules import eval_mode, is_parallel, unwrap


def test_parallel_wrappers_are_recognized_and_removed():
    model = nn.Linear(2, 2)
    wrapped = nn.DataParallel(model)
    assert is_parallel(wrapped)
    assert not is_parallel(model)
    assert unwrap(wrapped) is model
    assert unwrap(model) is model


def test_eval_mode_leaves_frozen_modules_frozen():
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Dropout())
    model.train()
    model[0].eval()
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, False, True]
