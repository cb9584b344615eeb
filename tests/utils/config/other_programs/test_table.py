"""The table of other programs' names agrees with our flags."""

from __future__ import annotations

import pytest

from utils.config.commands import COMMANDS
from utils.config.flags import flag_actions, flag_name, given_values
from utils.config.other_programs import table as table_module
from utils.config.parser import parse_config
from utils.config.recipes import read_recipe
from utils.config.settings import HYPERPARAMETERS, TrainConfig
from utils.errors import Mistakes


def test_the_table_names_only_flags_and_hyperparameters_that_exist():
    table = table_module.table()
    assert {*table.synonyms.values()} <= {*HYPERPARAMETERS}
    for command, translations in table.commands.items():
        own_flags = table_module.actions_of(command)
        replacements = [*translations.same_flags.values()]
        for flags_by_value in translations.arguments_to_flags.values():
            replacements += flags_by_value.values()
        assert {text.split()[0] for text in replacements} <= own_flags.keys(), command
        assert translations.refused_values.keys() <= own_flags.keys(), command
        assert not own_flags.keys() & {*translations.refused, *translations.without_effect, *translations.same_flags}


@pytest.mark.parametrize("command", ["train", "kfold", "search", "val", "detect", "export"])
def test_no_value_that_our_flag_takes_has_another_meaning_in_the_table(command):
    """Otherwise, the meaning would depend on whether another word of the line is in the table."""
    translations = table_module.table_of(command)
    cls = COMMANDS[command].settings
    listed = [*translations.default_arguments.items()]
    listed += [(name, value) for name, by_value in translations.arguments_to_flags.items() for value in by_value]
    for name, pattern in listed:
        action = flag_actions(cls).get(flag_name(name))
        if action is not None:
            assert action.nargs != 0, f"{name}: true and false are ours"
            value = pattern.replace(r"\d+", "7").replace("\\", "")
            mistakes = Mistakes()
            given_values(cls, [f"{flag_name(name)}={value}"], mistakes)
            assert any(flag_name(name) in message and value in message for message in mistakes.messages), name
    assert not any(flag_name(name) in flag_actions(cls) for name in translations.ignored_arguments)


def test_command_lines_and_recipes_of_ours_do_not_read_the_table(monkeypatch: pytest.MonkeyPatch):
    table_module.table.cache_clear()
    monkeypatch.setattr(table_module, "CONFIGS", None)
    parse_config(TrainConfig, ["--img", "64", "--no-cos-lr", "--set", "lr0=0.1", "--freeze", "0", "1"])
    read_recipe("finetune", pretrained=True)
