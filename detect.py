"""Finds objects in images, folders, videos, webcams and streams, and writes annotated media, labels, JSON and crops.

python detect.py --weights runs/train/exp/best.pt --source photos/
python detect.py --weights best.pt --source clip.mp4 --save-txt --save-conf

If one of several files cannot be read, or its results cannot be written, a warning names it and detection goes on with
the next; the exit status is then 2, and the last line counts such files.
"""

from __future__ import annotations

if __name__ == "__main__":
    from utils.interrupts import exit_on_interrupt

    exit_on_interrupt()  # while the following imports run

import signal
import sys
from collections.abc import Sequence

from utils.config.parser import parse_config
from utils.config.settings import DetectConfig
from utils.distributed.launch import require_one_process
from utils.entrypoint import run_main
from utils.errors import UserError, all_mistakes


def main(argv: Sequence[str] | None = None) -> None:
    config = parse_config(DetectConfig, argv, __doc__.split("\n")[0])
    require_one_process("detect.py")
    if config.save_conf and not config.save_txt:
        raise UserError("--save-conf: adds the confidence to the txt labels; give --save-txt too")
    if config.save_conf and config.track:
        raise UserError("--save-conf: the txt files of --track always have the confidence; leave it out")
    from engine.inference.source_files import check_source
    from models.weights.catalog import check_weights

    with all_mistakes() as mistakes:
        with mistakes.noted():
            check_source(config.source)
        with mistakes.noted():
            check_weights(config.weights)
    from engine.commands.detect import detect  # imports torch, once the flags and files are known to be valid

    _exit_in_order_on_signals()
    detect(config)


def _exit_in_order_on_signals() -> None:
    """Makes SIGTERM (`docker stop`) and SIGHUP (a closed terminal) raise SystemExit, so that open files are finished.

    A signal that is ignored, as SIGHUP is under nohup, stays so.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, lambda received, _: sys.exit(128 + received))


if __name__ == "__main__":
    run_main(main)
