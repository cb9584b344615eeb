from __future__ import annotations

import pytest
import torch

from engine.parallel.control import Action
from engine.parallel.step_values import DelayedReader, DeviceValues, StepFlags, StepSums, StepValues


@pytest.mark.parametrize("parts", [0, 3])
def test_sums_are_unpacked_as_they_were_packed(parts):
    flags = StepFlags(stop=True).as_counts(torch.zeros(1))
    sums = StepSums(normalizer=torch.tensor(7.0), parts=torch.arange(float(parts)), flags=flags)
    vector = sums.pack()
    assert vector.shape == (1 + parts + 3,)
    back = StepSums.unpack(2 * vector)  # as of two ranks
    assert back.normalizer.shape == ()
    assert back.normalizer == 14
    assert back.parts.tolist() == [2.0 * number for number in range(parts)]
    assert StepFlags.from_counts(back.flags.tolist()) == StepFlags(stop=True)


def test_values_reach_the_host_a_step_late():
    reader = DelayedReader(torch.device("cpu"))
    for step in range(2):
        values = DeviceValues(
            finite=torch.tensor(1.0),
            local_finite=torch.tensor(0.0),
            grad_norm=torch.tensor(2.5),
            flags=torch.tensor([0.0, 0.0, 2.0]),
            losses=torch.tensor([0.5, float(step)]),
        )
        reader.push(values, paths=(f"{step}.jpg",))
    assert reader.pop() == [
        StepValues(
            finite=True,
            local_finite=False,
            grad_norm=2.5,
            flags=StepFlags(interrupt=True),
            losses=(0.5, 0.0),
            paths=("0.jpg",),
        )
    ]
    assert [values.paths for values in reader.pop(leave=0)] == [("1.jpg",)]


def test_properties_of_actions():
    actions = (Action.CONTINUE, Action.SAVE, Action.END, Action.SAVE | Action.END, Action.STOP)
    assert [action.saves for action in actions] == [False, True, False, True, True]
    assert [action.ends_run for action in actions] == [False, False, True, True, True]
    assert [action.skips_rest for action in actions] == [False, False, False, False, True]
