"""Run folders count up."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.run.new_folder import check_run_dir, increment_path
from tests.helpers.messages import refused


def test_run_folders_count_up(tmp_path):
    made = [increment_path(tmp_path / "runs", "exp") for _ in range(3)]
    assert [folder.name for folder in made] == ["exp", "exp2", "exp3"]
    made[1].rmdir()
    assert increment_path(tmp_path / "runs", "exp").name == "exp2"
    assert increment_path(tmp_path / "runs", "exp", exist_ok=True) == made[0]


def test_a_run_folder_whose_name_has_a_dot_counts_up_at_its_end(tmp_path):
    assert [increment_path(tmp_path, "v1.5").name for _ in range(2)] == ["v1.5", "v1.52"]


def test_runs_that_are_started_together_get_different_folders(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: increment_path(tmp_path, "exp"), range(40)))
    assert len(set(made)) == 40


@pytest.mark.parametrize(
    ("folder", "exist_ok", "message"),
    [
        ("runs", False, "runs/exp: a file with this name exists; choose another --project or --name"),
        ("runs", True, "runs/exp: a file with this name exists; choose another --project or --name"),
        (".", True, "exp: a file with this name exists; choose another --project or --name"),
        (
            "/proc/x",
            False,
            "/proc/x/exp: cannot be created (no such file or directory); choose another --project or --name",
        ),
    ],
)
def test_a_folder_that_cannot_be_made_is_a_user_error(tmp_path, folder, exist_ok, message):
    (tmp_path / "runs").write_text("")
    (tmp_path / "exp").write_text("")
    with refused(message):
        increment_path(tmp_path / folder, "exp", exist_ok)


@pytest.mark.parametrize("name", ["x" * 300, f"folder/{'x' * 300}", f"{'x' * 300}/exp"])
@pytest.mark.parametrize("exist_ok", [False, True])
def test_a_name_that_is_too_long_is_refused_before_anything_is_made(tmp_path, name, exist_ok):
    for refuses in (check_run_dir, increment_path):
        with refused(f"{name}: cannot be created (file name too long); choose another --project or --name"):
            refuses(tmp_path, name, exist_ok)


@pytest.mark.parametrize("name", ["exp", "../../exp", "a/../../exp", "..", "."])
def test_the_check_makes_nothing(tmp_path, name):
    project = tmp_path / "parent" / "project"
    project.mkdir(parents=True)
    check_run_dir(project, name)
    check_run_dir(project / "absent", name)
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "parent", project]
