"""Atomic writes."""

import errno
import stat

import pytest

from utils.files.safe_io import atomic_write, write_whole


def test_an_atomic_write_leaves_only_the_complete_file(tmp_path):
    path = tmp_path / ("n\u00e4me " * 30 + ".txt")  # hardly room for a longer name beside it
    write_whole(path, "caf\udce9 \u00fc")
    assert path.read_bytes() == b"caf\\udce9 " + "\u00fc".encode()
    with atomic_write(path, durable=True) as file:
        file.write(b"second")
        assert path.read_bytes() != b"second"
    assert path.read_bytes() == b"second"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    plain = tmp_path / "plain"
    plain.write_text("")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)  # readable by whom others are


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_content(tmp_path, error):
    path = tmp_path / "a.txt"
    write_whole(path, "old")

    def fail() -> None:
        with atomic_write(path) as file:
            file.write(b"new")
            raise error

    with pytest.raises(type(error)) as caught:
        fail()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    if isinstance(error, OSError):
        assert caught.value.filename == str(path)


def test_an_error_about_a_missing_folder_names_the_target_file(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        write_whole(tmp_path / "none" / "a.txt", "x")
    assert caught.value.filename == str(tmp_path / "none" / "a.txt")
