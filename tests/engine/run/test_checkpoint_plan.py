from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from engine.checkpoint.progress import PendingEpoch, Progress
from engine.run.checkpoint_plan import choose_epochs, reason_to_end
from engine.run.run import StartedFrom
from tests.helpers.run_checkpoints import STORED, checkpoint_of
from utils.config.settings import TrainConfig


@pytest.mark.parametrize(
    ("epoch", "settings", "given", "message"),
    [
        (10, {}, (), r"all epochs are done \(10\); to train longer: --resume RUN --epochs N$"),
        (10, {"epochs": 9}, ("epochs",), "--epochs 9: 10 are done already; to train longer: --resume RUN --epochs N$"),
        (10, {"time": 2.0}, (), r"--time 2: no further epoch fits \(10 epochs took 2:00:00\); .* RUN --time HOURS "
                                r"\(of the whole run\) or --epochs N$"),
        (7, {"patience": 4}, (), r"stopped early after epoch 7: no better AP in 4 epochs \(--patience 4\); to "
                                 "continue, wait for longer: --resume RUN --patience N, above 4, or 0$"),
        (7, {"patience": 3, "val_every": 7}, ("patience",), r"stopped early .* in 4 epochs \(--patience 3\)"),
        (7, {"patience": 5}, (), None),
        (7, {"patience": 0}, (), None),
        (7, {"patience": 4, "val_every": 2}, (), None),  # the next validation decides
        (9, {}, (), None),
    ],
)  # fmt: skip
def test_a_run_that_has_ended_says_how_it_continues(epoch, settings, given, message):
    progress = Progress(epoch=epoch, best_epoch=3, best_fitness=0.5)
    run = dataclasses.replace(STORED["run"], seconds=7200.0)
    config = TrainConfig(**{"batch_size": 8, "epochs": 10, **settings})
    path = Path("some runs/exp/last.pt")
    started_from = StartedFrom.of(checkpoint_of(progress=progress, run=run, config=config, path=path))
    reason = reason_to_end(started_from, config, given)
    if message is None:
        assert reason == ""
    else:
        assert re.match(message.replace("RUN", "'some runs/exp/last.pt'"), reason)


def test_a_run_whose_last_epoch_has_no_scores_yet_has_not_ended():
    """``--eval-ranks``, stopped and resumed with fewer epochs."""
    pending = PendingEpoch(row={}, is_closing=False, progress=Progress(epoch=5), ema={})
    started_from = StartedFrom.of(checkpoint_of(progress=Progress(epoch=5), pending=pending))
    assert reason_to_end(started_from, TrainConfig(epochs=5), ("epochs",)) == ""


def test_a_longer_time_continues_a_run_whose_epochs_are_done():
    progress = Progress(epoch=10)
    run = dataclasses.replace(STORED["run"], seconds=3600.0)
    started_from = StartedFrom.of(checkpoint_of(progress=progress, run=run))

    def epochs(hours: float, *given: str, stored: int = 10) -> int:
        return choose_epochs(started_from, TrainConfig(epochs=stored, time=hours), given)

    assert epochs(2.0, "time") == 20
    assert epochs(1.04, "time") == 10
    assert epochs(2.0) == 10  # the time of the run itself
    assert epochs(2.0, "time", stored=50) == 50  # it goes on, and `TimeLimit` decides
    assert epochs(0.0, "time", stored=10) == 10
