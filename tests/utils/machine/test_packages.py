"""Matplotlib, imported where it has no folder of its own."""

import logging
import os
import subprocess
import sys

import pytest

from tests.helpers.repository import ROOT
from utils.machine.packages import import_quietly

PROGRAM = """
import numpy as np
from utils.drawing.draw import class_colors, draw_boxes
from utils.drawing.figures import new_figure, render_figure
from utils.machine.packages import require_package
{first}
require_package("matplotlib", "plots", "--noplots")
render_figure(new_figure(2, 2))
draw_boxes(np.zeros((64, 64, 3), np.uint8), np.array([[1.0, 1, 40, 40]]), ["a \\u732b"], class_colors(np.array([0])))
"""


@pytest.mark.parametrize(
    "first",
    [
        pytest.param("", marks=pytest.mark.slow),
        pytest.param("render_figure(new_figure(2, 2))", marks=pytest.mark.slow),
        "from utils.drawing.text import text_mask; text_mask('\\u732b', 10)",
    ],
)
def test_plots_without_a_home_folder_print_nothing(first, tmp_path):
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MPL", "XDG_"))}
    environment = kept | {"HOME": "/proc/nowhere", "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    program = PROGRAM.format(first=first)
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_the_level_of_the_packages_logger_is_as_before():
    logger = logging.getLogger("matplotlib")
    before = logger.level
    with pytest.raises(ImportError):
        import_quietly("matplotlib.no_such_module")
    assert logger.level == before
