"""Finds objects in images, folders, videos, webcams and streams, and writes annotated media, labels, JSON and crops.

python detect.py --weights runs/train/exp/best.pt --source photos/
python detect.py --weights best.pt --source clip.mp4 --save-txt --save-conf

If one of several files cannot be read, or its results cannot be written, a warning names it and detection continues
with the next one; the exit status is then 2, and the last line counts the failed files.
"""

from __future__ import annotations

if __name__ == "__main__":
    from utils.process.signals import exit_on_interrupt

    exit_on_interrupt()  # while the following imports run

import signal
import sys
from collections.abc import Sequence

from utils.config.settings import DetectConfig
from utils.process.main import run_command, run_main


def main(argv: Sequence[str] | None = None) -> None:
    run_command("detect", _detect, argv)


def _detect(config: DetectConfig) -> None:
    from models.weights.catalog import check_weights  # imports NumPy, slow for --help

    check_weights(config.weights)
    from engine.inference.detect import detect  # imports torch, once the weights are known to exist

    _exit_in_order_on_signals()
    detect(config)


def _exit_in_order_on_signals() -> None:
    """Makes SIGTERM (`docker stop`) and SIGHUP (a closed terminal) raise SystemExit, so that open files are completed.

    A signal that is already ignored, such as SIGHUP under nohup, stays ignored.
    """
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):  # Windows has no SIGHUP
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, lambda received, _: sys.exit(128 + received))


if __name__ == "__main__":
    run_main(main)
