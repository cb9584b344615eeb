"""The start of a run that has ended, but whose report is missing."""

from __future__ import annotations

from engine.hooks.hook import Epoch
from engine.train.trainer import Trainer


class ReportOnlyTrainer(Trainer):
    """Reports a run that has ended. Takes no step, and leaves last.pt as it is unless it has to score the pending
    epoch."""

    def _do_remaining_work(self) -> None:
        """Reports the last epoch. Its scores are stored, unless it is still pending, but the report also needs the
        detections: it is validated again."""
        if self.pending is not None:
            self._conclude_pending(saves_last=True)
            return
        epoch = Epoch(self.progress.epoch)
        if self._last_recorded.metrics:  # otherwise it was not validated, or a later epoch has changed the weights
            self._set_closing(epoch.number)
            self.call_hooks("before_validation")
            if self._follow(self.validator.validate(epoch)).skips_rest:
                return
        self.call_hooks("report", epoch)

    def _save_on_request(self) -> None:
        """Leaves last.pt as it is: if this start fails, the next one also writes the report."""

    def _ended_by_callback(self) -> bool:
        """Returns True if a callback has ended the run, in an earlier process or in this one."""
        started_from = self.run.started_from
        had_ended = started_from is not None and started_from.ended_by_callback
        return had_ended or super()._ended_by_callback()
