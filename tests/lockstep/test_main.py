from __future__ import annotations

import pytest

from lockstep.__main__ import main


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("predict", "predict: no such command (lockstep detect does this); commands are train, val, "),
        ("track", "track: no such command (lockstep detect --track botsort does this); commands are train, val, "),
        ("trian", "trian: no such command (did you mean 'train'?); commands are train, val, "),
        ("cfg=a.yaml", "cfg=a.yaml: no such command; commands are train, val, "),
    ],
)
def test_an_unknown_command_is_one_line_with_what_was_meant(name, hint, capsys):
    with pytest.raises(SystemExit):
        main([name])
    assert capsys.readouterr().err.startswith(f"error: {hint}")
