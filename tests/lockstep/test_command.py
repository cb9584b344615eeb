"""How a command is started, shown, interrupted and ended."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from tests.helpers.messages import refused
from tests.helpers.repository import ROOT
from utils.logger import terminal_bars


def test_a_result_that_could_not_be_written_is_one_line(command):
    """The result file is in the temporary folder, whose disk may be full, though that of the run is not."""
    command("print('done')")
    with pytest.raises(lockstep.Error, match=r"^train ended without reporting its result \(.* may be full"):
        lockstep.train("demo")


@pytest.mark.parametrize(("world_size", "passed"), [("1", set()), ("2", {"RANK", "WORLD_SIZE"})])
def test_the_variables_of_a_launcher_of_one_process_are_not_passed_on(command, monkeypatch, capsys, world_size, passed):
    """Otherwise, a second command would join the launcher's store as the same rank."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", world_size)
    command("print(*({'RANK', 'WORLD_SIZE'} & set(os.environ))); write_result(folder='a')")
    lockstep.val("best.pt")
    assert set(capsys.readouterr().out.split()) == passed


def test_an_error_is_the_line_of_the_command_and_not_shown_twice(command, capsys):
    command("print('a line'); write_result(error='data.yaml: is wrong'); sys.exit(2)")
    with refused("data.yaml: is wrong", lockstep.Error):
        lockstep.train("demo")
    assert capsys.readouterr().out == "a line\n"
    command("sys.exit(3)")
    with refused("exit status 3", lockstep.Error):
        lockstep.check("data.yaml")
    command("os.kill(os.getpid(), signal.SIGKILL)")
    with refused("killed by SIGKILL; is there enough memory?", lockstep.Error):
        lockstep.export("best.pt")


def test_a_check_that_fails_after_it_has_found_issues_is_an_error(command):
    command("write_result(issues=['blurred']); sys.exit(1)")
    assert lockstep.check("data.yaml") == {"issues": ["blurred"]}
    command("write_result(issues=['blurred']); write_result(error='standard output cannot be written'); sys.exit(2)")
    with refused("standard output cannot be written", lockstep.Error) as caught:
        lockstep.check("data.yaml")
    assert caught.value.result.values["issues"] == ["blurred"]
    command("write_result(issues=[]); sys.exit(1)")
    with refused("exit status 1", lockstep.Error):
        lockstep.check("data.yaml")


def test_a_program_that_outlives_the_command_is_not_waited_for(command, tmp_path, capsys):
    """A service that a callback has started holds the output of the command open."""
    command("""
import subprocess
service = '''
import pathlib, time
for _ in range(200):
    time.sleep(0.1)
    if pathlib.Path("returned").exists():
        raise SystemExit
pathlib.Path("was waited for").touch()
'''
subprocess.Popen([sys.executable, "-c", service])
write_result(folder="a")
print("x" * 100_000 + "end")
""")
    assert lockstep.train("demo").folder == tmp_path / "a"
    (tmp_path / "returned").touch()
    assert not (tmp_path / "was waited for").exists()
    assert capsys.readouterr().out == "x" * 100_000 + "end\n"


def test_an_interrupt_is_passed_on_once_and_returns_the_run(command, tmp_path, monkeypatch):
    handle = signal.signal

    def noted(number: int, handler: object) -> object:
        before = handle(number, handler)
        (tmp_path / "passes on").touch()
        return before

    monkeypatch.setattr(signal, "signal", noted)
    command("""
def stop(*_):
    pathlib.Path("count").open("a").write("x")
    pathlib.Path("last.pt").touch()
    time.sleep(0.2)
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
write_result(folder=".")
while not os.path.exists("passes on"):
    time.sleep(0.01)
os.kill(os.getppid(), signal.SIGINT)
time.sleep(60)
""")
    run = lockstep.train("demo")
    assert run.folder == tmp_path
    assert (tmp_path / "count").read_text() == "x"


def test_an_interrupt_without_a_checkpoint_is_an_interrupt(command):
    command("os.kill(os.getppid(), signal.SIGINT); time.sleep(60)")
    with pytest.raises(KeyboardInterrupt):
        lockstep.train("demo")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_bar_is_shown_as_it_moves(command, capsys):
    command(r"""sys.stderr.write("\r10%|#   \r20%|##  "); sys.stderr.flush(); time.sleep(0.3)
sys.stderr.write("\r          \r"); print("ö"); write_result(folder="runs/val/exp")""")
    assert lockstep.val("best.pt").folder.parts[-3:] == ("runs", "val", "exp")
    assert capsys.readouterr().out == "\r10%|#   \r20%|##  \r          \rö\n"


def test_half_a_character_at_the_end_is_shown(command, capsys):
    command(r"sys.stdout.buffer.write(b'a\xc3'); write_result(folder='a')")
    lockstep.val("best.pt")
    assert capsys.readouterr().out == "a\N{REPLACEMENT CHARACTER}"


def test_a_closed_output_does_not_stop_the_command(command, tmp_path, monkeypatch):
    """A notebook may close it, or the reader of a pipeline may have ended."""
    read, write = os.pipe()
    os.close(read)
    command("print('a line'); time.sleep(0.2); print('b'); pathlib.Path('done').touch(); write_result(folder='a')")
    closed = io.StringIO()
    closed.close()
    for output in (os.fdopen(write, "w", buffering=1, closefd=False), closed, None):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", output)
            assert lockstep.train("demo").folder == tmp_path / "a"
        (tmp_path / "done").unlink()
    os.close(write)


def test_bars_are_drawn_for_the_process_that_shows_them(monkeypatch, capsys):
    assert terminal_bars(sys.stderr) is None
    monkeypatch.setenv("LOCKSTEP_TERMINAL", "1")
    assert terminal_bars(sys.stderr) is not None


def test_a_command_is_started_without_importing_torch():
    code = "import sys, lockstep.api; print({'torch', 'numpy'} & set(sys.modules))"
    interpreter = Path(sys.prefix, "bin", "python")  # not one that has imported it
    done = subprocess.run([interpreter, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
