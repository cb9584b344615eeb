from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from engine.optim.build import RULES, LoadedParameters, OptimizerSettings, build_optimizer, resolve_optimizer
from engine.optim.optimizer_set import OptimizerSet
from engine.optim.schedule import Schedule, step_plan
from engine.train.saver import copy_to_cpu
from utils.config.settings import TrainConfig


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.SiLU(),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 5),
    )


def build(
    model: nn.Module,
    name: str,
    *,
    new_rows: dict[str, tuple[int, ...]] | None = None,
    lr_mult: float = 1.0,
    new_lr_mult: float = 1.0,
    **settings,
) -> OptimizerSet:
    loaded = LoadedParameters(new_rows=new_rows or {}, lr_mult=lr_mult, new_lr_mult=new_lr_mult)
    return build_optimizer(model, name, OptimizerSettings(**settings), loaded)


def take_steps(model: nn.Module, optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        model(torch.randn(4, 3, 8, 8, generator=generator)).square().mean().backward()
        optimizer.step(torch.tensor(0.0))
        optimizer.zero_grad()


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_momentum_after_the_first_step_equals_torchs(momentum):
    ours = network()
    theirs = network()
    sgd = build(ours, "SGD", lr=0.05, momentum=momentum, weight_decay=0.01)
    groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in sgd.param_groups]
    match = dict(zip(ours.parameters(), theirs.parameters()))
    for group in groups:
        group["params"] = [match[p] for p in group["params"]]
    plain = torch.optim.SGD(groups, lr=0.05, momentum=momentum, nesterov=momentum > 0, fused=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for a, b in match.items():
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        sgd.step()
        plain.step()
    assert all(torch.equal(a, b) for a, b in match.items())


def test_a_late_first_gradient_starts_with_zero_momentum():
    """--skip-zero-grads skips some parameters; torch's own SGD raises TypeError at the second step."""
    model = network()
    sgd = build(model, "SGD", lr=0.05, momentum=0.9, weight_decay=0.0)
    first, *rest = model.parameters()
    for parameter in rest:
        parameter.grad = torch.ones_like(parameter)
    sgd.step()
    first.grad = torch.ones_like(first)
    before = first.detach().clone()
    sgd.step()
    torch.testing.assert_close(first, before - 0.05 * 1.9)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    ("before", "after", "known_factor", "new_factor"),
    [
        ({"lr": 0.01}, {"lr": 0.01, "lr_mult": 0.25}, 0.25, 1),
        ({"lr": None, "lr_mult": 0.25}, {"lr": None, "lr_mult": 0.25, "new_lr_mult": 2.0}, 1, 2),
    ],
)
def test_known_and_new_rows_have_rates_of_their_own(name, before, after, known_factor, new_factor):
    """With the option, the first steps of parameters are multiples of those without it."""
    known = {"0.weight": (1, 3), "1.weight": (), "1.bias": ()}  # of the first, rows 1 and 3 are new

    def moved(**options) -> dict[str, torch.Tensor]:
        model = network()
        start = copy.deepcopy(model.state_dict())
        options["new_rows"] = known if "lr_mult" in options else {}
        take_steps(model, build(model, name, momentum=0.9, weight_decay=0.0, **options), 1)
        return {key: p.detach() - start[key] for key, p in model.named_parameters()}

    plain = moved(**before)
    for key, change in moved(**after).items():
        expected = plain[key] * (known_factor if key in known else new_factor)
        for row in known.get(key, ()):
            expected[row] = plain[key][row] * new_factor
        torch.testing.assert_close(change, expected, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("settings", [{"lr": None}, {"lr": None, "lr_factor": 0.1}, {"lr": 0.5}])
def test_biases_begin_at_an_absolute_rate(settings):
    """Neither lr0 nor lr_factor multiplies ``warmup_bias_lr``, as in YOLOv5."""
    optimizer = build(network(), "SGD", momentum=0.9, weight_decay=0.0, **settings)
    last = RULES["SGD"].lr if settings["lr"] is None else settings["lr"]
    last *= settings.get("lr_factor", 1.0)
    warm = {"final": 1.0, "cosine": False, "momentum": 0.9, "warmup_momentum": 0.8, "warmup_bias_lr": 0.1}
    optimizer.set_rates(Schedule(total_steps=50, warmup_steps=9, **warm), 0)
    assert optimizer.rates()["lr/bias"] == pytest.approx(0.1 + (last - 0.1) / 10)


def test_auto_depends_on_the_length_of_the_run():
    assert resolve_optimizer("auto", 100) == "Muon"
    assert resolve_optimizer("auto", 10**6) == "SGD"
    for time, optimizer in ((0, "SGD"), (1, "Muon")):  # with --time the length is unknown
        config = TrainConfig(epochs=3000, time=time)
        steps = step_plan(config, epoch_batches=10)
        assert resolve_optimizer(config.optimizer, steps.planned_steps) == optimizer
    assert resolve_optimizer("Adam", 100) == "Adam"


@pytest.mark.parametrize("name", RULES)
def test_a_loaded_optimizer_continues_as_an_uninterrupted_one(name):
    """Its weights may be channels_last: the saved state has another memory layout than the weights, and fused kernels
    ignore strides."""

    def run(interrupted: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 3, 3))
        model.to(memory_format=torch.channels_last)
        optimizer = build(model, name, lr=0.1, momentum=0.9, weight_decay=0.01)
        for step in range(4):
            if interrupted and step == 2:
                file = io.BytesIO()
                torch.save(copy_to_cpu({"optimizer": optimizer.state_dict()}), file)
                file.seek(0)
                optimizer = build(model, name, lr=0.1, momentum=0.9, weight_decay=0.01)
                optimizer.load_state_dict(torch.load(file)["optimizer"])
            model(torch.randn(2, 4, 8, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True)))
