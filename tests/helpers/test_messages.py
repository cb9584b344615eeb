from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.helpers import messages
from tests.helpers.messages import MESSAGES, REPOSITORY, Messages
from utils.errors import UserError


def test_each_message_is_that_of_a_test():
    for test in MESSAGES.read():
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (REPOSITORY / file).read_text(), test


def test_a_message_that_changes_fails_until_it_is_renewed(tmp_path, monkeypatch):
    monkeypatch.setattr(messages, "FILE", tmp_path / "messages.txt")
    item = SimpleNamespace(nodeid="tests/test_a.py::test_b[x y]", funcargs={"tmp_path": str(tmp_path / "test0")})

    def run(texts: list[str], *, renew: bool = False) -> None:
        monkeypatch.setattr(messages, "MESSAGES", Messages())
        messages.MESSAGES.renew = renew
        with messages.MESSAGES.of_test(item):
            for text in texts:
                with messages.refused():
                    raise UserError(text)
        if renew:
            messages.MESSAGES.write()

    first = [f"{tmp_path}/test0/a.txt:  is wrong", "so is ü"]
    run(first, renew=True)
    (tmp_path / "test_a.py").touch()
    assert (tmp_path / "messages.txt").read_text().splitlines()[-2:] == [
        8 * " " + "TMP/a.txt:  is wrong",
        8 * " " + "so is ü",
    ]
    run(first)
    for texts, line in ((first[:1], "no longer provokes: so is ü"), ([*first, "new"], "message 3"), (first[::-1], "1")):
        with pytest.raises(pytest.fail.Exception, match=line):
            run(texts)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"), messages.refused():
        pass
