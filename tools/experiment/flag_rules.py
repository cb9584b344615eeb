"""Flags of train.py that an experiment rejects."""

from __future__ import annotations

from utils.config.tool_settings import KfoldConfig
from utils.errors import all_mistakes


def refuse_unsupported_flags(config: KfoldConfig) -> None:
    """Raises UserError for flags that make no sense if several trainings are compared, or if the same command continues
    the work in its folder."""
    continues = f"leave it out; the same command continues the work in {config.folder}"
    reasons = {
        "--resume": continues if config.resume is not None else "",
        "--exist-ok": continues if config.exist_ok else "",
        "--export": "leave it out; export.py exports the weights that you finally choose" if config.export else "",
        "--time": "leave it out; compared trainings must have the same --epochs" if config.time else "",
        "--keep-old": "the data has no labels to score the kept classes; use train.py" if config.keep_old else "",
        "--val-fraction": "leave it out; each fold is held out in turn" if config.val_fraction and config.folds else "",
    }
    with all_mistakes() as mistakes:
        for flag, reason in reasons.items():
            if reason:
                mistakes.add(f"{flag}: {reason}")
