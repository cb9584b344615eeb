from __future__ import annotations

from tests.helpers.messages import MESSAGES, REPOSITORY


def test_each_message_is_that_of_a_test():
    for test in MESSAGES.read():
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (REPOSITORY / file).read_text(), test
