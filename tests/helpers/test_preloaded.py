"""The preloaded interpreter compared with a real one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.preloaded import python

SHOW = "import sys; print(__name__, sys.argv, sys.path[0])"


def ends(interpreter: str, *argv: str, **options) -> tuple[int, str, str]:
    """Runs an interpreter. Returns its status, its output, and the last line of its errors."""
    process = subprocess.run([interpreter, *argv], capture_output=True, text=True, check=False, **options)
    return process.returncode, process.stdout, (process.stderr.splitlines() or [""])[-1]


def check_is_the_same(*argv: str, **options) -> tuple[int, str, str]:
    """Checks that both interpreters end in the same way, and returns how."""
    ended = ends(python(), *argv, **options)
    assert ended == ends(sys.executable, *argv, **options)
    return ended


def test_arguments_and_the_first_folder_of_imports(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "script.py").write_text(f"{SHOW}; print(__file__)")
    for argv in (["-c", SHOW], ["-u", "-c", SHOW], ["-B", "-c", SHOW], ["folder/script.py"], ["-m", "folder.script"]):
        status, out, _ = check_is_the_same(*argv, "a", "b c", "")
        assert status == 0
        assert "'b c'" in out


def test_options_that_only_a_real_interpreter_has():
    assert check_is_the_same("-I", "-c", "import sys; print(sys.flags.isolated)") == (0, "1\n", "")


@pytest.mark.parametrize(
    ("program", "status", "error"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit(259)", 3, ""),
        ("sys.exit('no')", 1, "no"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("os._exit(5)", 5, ""),
        ("if", 1, "SyntaxError: invalid syntax"),
    ],
)
def test_how_a_program_ends(program, status, error):
    assert check_is_the_same("-c", f"import os, signal, sys\n{program}") == (status, "", error)


def test_threads_and_functions_for_the_end_run_before_the_output_is_complete():
    program = """
        import atexit, threading
        atexit.register(print, "end")
        released = threading.Event()
        threading.Thread(target=lambda: released.wait() and print("thread")).start()
        print("main")
        released.set()
    """
    program = "if True:\n" + program
    assert check_is_the_same("-c", program) == (0, "main\nthread\nend\n", "")


def test_what_a_process_inherits(tmp_path):
    program = "import os, sys; print(os.getcwd(), os.environ['A'], oct(os.umask(0)), sys.stdin.read(), os.getppid())"
    environment = os.environ | {"A": "x"}
    check_is_the_same("-c", program, cwd=tmp_path, env=environment, umask=0o027, input="typed")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-"])
def test_closed_streams(closed):
    program = "import sys; print([stream is None for stream in (sys.stdin, sys.stdout, sys.stderr)], file=open(3, 'w'))"
    for interpreter in (python(), sys.executable):
        command = ["sh", "-c", f'exec 3>&1; exec "$0" "$@" {closed}', interpreter, "-c", program]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert shown == f"{['<' in closed, ' >' in f' {closed}', '2>' in closed]}\n"


def test_signals_reach_the_program():
    program = """if True:
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
        print("ready", flush=True)
        time.sleep(60)
    """
    for number, status in ((signal.SIGTERM, 9), (signal.SIGUSR1, -signal.SIGUSR1), (signal.SIGKILL, -signal.SIGKILL)):
        with subprocess.Popen([python(), "-c", program], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
            assert process.wait(60) == status
            assert process.stdout.read() == ""  # the program has ended, too


def test_a_package_that_cannot_be_imported_is_shown_by_each_program(tmp_path):
    helpers = tmp_path / "tests" / "helpers"
    shutil.copytree(Path(__file__).parent, helpers, ignore=lambda _, names: {n for n in names if "preloaded" not in n})
    (tmp_path / "torch.py").write_text("raise RuntimeError('broken')")
    program = """if True:
        import subprocess
        from tests.helpers.preloaded import preloaded_python, python
        with preloaded_python():
            for _ in range(2):
                print(subprocess.run([python(), "-c", "1"], capture_output=True, text=True))
    """
    environment = {name: value for name, value in os.environ.items() if name != "LOCKSTEP_TEST_PYTHON"}
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    lines = process.stdout.splitlines()
    assert len(lines) == 2
    assert all("returncode=1" in line and "RuntimeError: broken" in line for line in lines)
    assert process.stderr == ""
