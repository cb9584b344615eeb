import math

import pytest

from engine.optim.schedule import Schedule, StepPlan, build_schedule, epochs_in_time
from utils.config.settings import Hyperparameters


def schedule(**changes) -> Schedule:
    values = {
        "total_steps": 101, "warmup_steps": 10, "final": 0.01, "cosine": False,
        "momentum": 0.9, "warmup_momentum": 0.8, "warmup_bias_lr": 0.1,
    }  # fmt: skip
    return Schedule(**{**values, **changes})


@pytest.mark.parametrize("cosine", [False, True])
def test_the_decay_is_monotonic_between_its_end_values(cosine):
    s = schedule(cosine=cosine)
    assert s.decay(0) == 1
    assert s.decay(100) == pytest.approx(0.01)
    assert s.decay(50) == pytest.approx(0.505)
    assert all(s.decay(i) >= s.decay(i + 1) for i in range(100))
    quarter = 0.01 + 0.99 * ((1 + math.cos(math.pi / 4)) / 2 if cosine else 0.75)
    assert s.decay(25) == pytest.approx(quarter)


def test_warmup_interpolates_rates_and_momentum():
    s = schedule()
    rates = [s.learning_rate(i, 1.0) for i in range(11)]
    assert 0 < rates[0] < 0.1
    assert rates == sorted(rates)
    assert rates[10] == s.decay(10)
    biases = [s.learning_rate(i, 0.01, start=s.warmup_bias_lr) for i in range(11)]
    assert biases[0] > biases[9] > biases[10]  # decreases from warmup_bias_lr
    assert s.momentum_at(0) == 0.8
    assert s.momentum_at(5) == pytest.approx(0.85)
    assert s.momentum_at(10) == 0.9
    assert schedule(total_steps=1, warmup_steps=0).learning_rate(0, 0.5) == 0.5


@pytest.mark.parametrize(
    ("done", "seconds", "total_s", "epochs"),
    [
        (3, 150, 600, 12),
        (9, 544, 600, 9),  # there is no time for another
        (9, 542, 600, 10),  # nearly
        (1, 900, 600, 1),
    ],
)
def test_epochs_follow_from_the_time(done, seconds, total_s, epochs):
    assert epochs_in_time(done, seconds, total_s) == pytest.approx(epochs)


@pytest.mark.parametrize(("warmup_epochs", "steps"), [(0.26, 3), (2.51, 25)])
def test_warmup_takes_at_most_a_quarter_of_the_steps(warmup_epochs, steps):
    plan = StepPlan(accumulate=1, per_epoch=10, epochs=10)
    assert build_schedule(Hyperparameters(warmup_epochs=warmup_epochs), plan, cosine=False).warmup_steps == steps
