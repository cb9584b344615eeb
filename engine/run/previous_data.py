"""The data set of the training or validation whose folder is used again (``--exist-ok``)."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from engine.checkpoint.newest_run import read_settings_yaml
from utils.errors import UserError
from utils.files.safe_io import read_text

_MAX_RESULTS_BYTES = 1 << 26  # size limit of results.json


def previous_data(folder: Path) -> str:
    """Returns the data set of the training or validation in ``folder``, or "" if there is none or it is not stored."""
    with contextlib.suppress(UserError, ValueError, RecursionError, TypeError, KeyError):
        if (folder / "settings.yaml").is_file():
            stored = read_settings_yaml(folder)
            return "" if stored is None else str(stored["config"]["data"])
        if (folder / "results.json").is_file():
            return str(json.loads(read_text(folder / "results.json", _MAX_RESULTS_BYTES))["settings"]["data"])
    return ""


def is_other_data(previous: str, data: str) -> bool:
    """Returns whether two names of data sets differ; "" is an unknown name."""
    return bool(previous and data) and os.path.abspath(previous) != os.path.abspath(data)
