"""Run folders count up."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.messages import refused
from utils.files.new_folder import check_run_dir, increment_path


def test_run_folders_count_up_also_when_started_together(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: increment_path(tmp_path / "runs", "v1.5"), range(40)))
    assert {folder.name for folder in made} == {"v1.5", *(f"v1.5{number}" for number in range(2, 41))}
    assert increment_path(tmp_path / "runs", "v1.5", exist_ok=True) == tmp_path / "runs" / "v1.5"


@pytest.mark.parametrize(
    ("folder", "name", "reason"),
    [
        ("runs", "exp", "a file with this name exists"),
        ("/proc/x", "exp", "cannot be created (no such file or directory)"),
        (".", "x" * 300, "cannot be created (file name too long)"),
    ],
)
def test_a_folder_that_cannot_be_made_is_a_user_error(tmp_path, folder, name, reason):
    """The check before makes nothing."""
    (tmp_path / "runs").write_text("")
    for refuses in (check_run_dir, increment_path):
        with refused(f"{name}: {reason}; choose another --project or --name"):
            refuses(tmp_path / folder, name)
    check_run_dir(tmp_path / "absent", "../exp")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
