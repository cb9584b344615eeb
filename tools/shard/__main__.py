"""Writes a data set as shards: tar files of images, with one index for each split.

python -m tools.shard DATA.yaml OUT                    # then: python train.py --data OUT
python -m tools.shard DATA.yaml OUT --split train val  # without the test split
python -m tools.shard DATA.yaml OUT --megabytes 1024   # size of a tar file

Images are not recompressed. The same data set produces the same bytes. OUT appears only once it is complete.
"""

from __future__ import annotations

if __name__ == "__main__":
    from utils.process.signals import exit_on_interrupt

    exit_on_interrupt()  # while the following imports run

from collections.abc import Sequence
from pathlib import Path

from tools.train_line import train_line
from utils.config.tool_settings import ShardConfig
from utils.logger import configure_logging, get_logger
from utils.process.main import run_command, run_main


def main(argv: Sequence[str] | None = None) -> None:
    run_command("shard", _shard, argv)


def _shard(config: ShardConfig) -> None:
    from tools.shard.write_shards import shard_data  # imports torch, once the flags are known to be valid

    configure_logging(True)
    splits = shard_data(config)
    get_logger().info("%s", train_line(Path(config.out), splits, max_bad=config.max_bad))


if __name__ == "__main__":
    run_main(main)
