"""The data of an earlier run in a folder that is used again."""

import pytest

from engine.run.previous_data import is_other_data, previous_data


@pytest.mark.parametrize(
    ("name", "text", "data"),
    [
        ("settings.yaml", "config: {data: a.yaml}", "a.yaml"),
        ("results.json", '{"settings": {"data": "b.yaml"}}', "b.yaml"),
        *(("settings.yaml", text, "") for text in ("", "- a", "config: 3", "config: {}", "a: [", "\ufffe")),
        *(("results.json", text, "") for text in ("", "[]", "{", '{"settings": 5}')),
        ("other.yaml", "config: {data: a.yaml}", ""),
    ],
)
def test_the_data_of_an_earlier_run_is_what_its_files_say(tmp_path, name, text, data):
    (tmp_path / name).write_text(text)
    assert previous_data(tmp_path) == data


def test_the_same_data_set_may_be_named_in_two_ways(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not is_other_data("a.yaml", str(tmp_path / "a.yaml"))
    assert is_other_data("a.yaml", "b.yaml")
    assert not is_other_data("", "b.yaml")
