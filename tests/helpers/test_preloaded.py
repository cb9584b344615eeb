"""The interpreter that has imported torch and the packages behaves like a new one."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.helpers.preloaded import python

ROOT = Path(__file__).parents[2]


def test_a_program_imports_the_packages_of_its_own_tree(tmp_path: Path):
    (tmp_path / "copy" / "engine").mkdir(parents=True)
    (tmp_path / "copy" / "engine" / "__init__.py").touch()
    for folder, expected in ((ROOT, ROOT), (tmp_path / "copy", tmp_path / "copy"), (tmp_path, None)):
        command = [python(), "-c", "import engine, sys; print(engine.__file__, 'engine.train.build' in sys.modules)"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if expected is None:
            assert "ModuleNotFoundError: No module named 'engine'" in done.stderr
        else:
            assert done.stdout == f"{expected}/engine/__init__.py {expected == ROOT}\n", done.stderr
