import logging
import os
import termios
from pathlib import Path

import pytest

from utils import logger as logger_module
from utils.logger import configure_logging, get_logger, terminal_bars, terminal_columns


def test_a_record_is_one_line(capsys, tmp_path):
    """This holds whatever its names contain; bytes that are not UTF-8 are escaped."""
    for _ in range(2):  # a second configuration replaces the first
        configure_logging(True, file_follows=True)
    logger_module.continue_in_file(tmp_path / "log.txt")
    get_logger().debug("never")
    get_logger().info("%s: %d boxes", "a\nerror: the disk is full\x1b[31m\r\u2028\x9b2J\u202e.jpg", 3)
    get_logger().warning("%s: skipped", Path("caf\udce9\t.jpg"))
    expected = "a error: the disk is full [31m 2J .jpg: 3 boxes\nwarning: caf\\udce9 .jpg: skipped\n"
    assert capsys.readouterr().out == expected
    assert (tmp_path / "log.txt").read_text() == expected


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_log_that_cannot_be_written_causes_one_warning(capfd, tmp_path):
    configure_logging(True, file_follows=True)
    logger_module.continue_in_file(Path("/dev/full"))
    get_logger().info("epoch 1")
    get_logger().info("epoch 2")
    configure_logging(True, file_follows=True)  # closes the file
    get_logger().info("before")
    (tmp_path / "file").write_text("in the way")
    logger_module.continue_in_file(tmp_path / "file" / "train.log")
    get_logger().info("after")
    out, err = capfd.readouterr()
    assert out.splitlines()[:3] == [
        "epoch 1",
        "warning: /dev/full: cannot be written (no space left on device)",
        "epoch 2",
    ]
    assert [line.partition(":")[0] for line in out.splitlines()[3:]] == ["before", "warning", "after"]
    assert err == ""


def test_other_processes_log_what_they_alone_know_and_write_no_file(capsys, tmp_path):
    configure_logging(False, file_follows=True)
    logger_module.continue_in_file(tmp_path / "log.txt")
    get_logger().warning("as the main process")
    get_logger().log(logger_module.ONE_RANK, "alone")
    get_logger().log(logging.ERROR, "shown")
    assert capsys.readouterr().out == "warning: alone\nerror: shown\n"
    assert not (tmp_path / "log.txt").exists()


def test_a_terminal_that_states_no_width_gets_plain_lines():
    configure_logging(True)
    _, terminal = os.openpty()  # 0 columns
    with open(terminal, "w") as stream:
        assert stream.isatty()
        assert terminal_bars(stream) is None
        assert terminal_columns(stream) > 0
        termios.tcsetwinsize(terminal, (24, 100))
        assert terminal_bars(stream) is not None
        assert terminal_columns(stream) == 100
