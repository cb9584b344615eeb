from __future__ import annotations

import dataclasses

import pytest

from tests.helpers.messages import refused
from tests.helpers.repository import ROOT
from utils.config.flags import words_of_settings
from utils.config.recipes import hyperparameters_from, read_recipe, unknown_key, with_overrides
from utils.config.settings import Hyperparameters
from utils.schema import build


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mosaik": 1}, "x.yaml: unknown key 'mosaik' (did you mean 'mosaic'?)"),
        ({"mosaic": 2}, "x.yaml: mosaic: must be at most 1, got 2"),
        ({"mosaic": "yes please"}, "x.yaml: mosaic: must be a number, got 'yes please'"),
        ({"close_mosaic": 1.5}, "x.yaml: close_mosaic: must be a whole number or null, got 1.5"),
        ({"momentum": 1}, "x.yaml: momentum: must be at most 0.9999, got 1"),
        ([1], "x.yaml: must be 'key: value' lines, got list"),
        (
            {"label_smoothing": 0.1},
            "x.yaml: 'label_smoothing': is a flag, not a hyper-parameter; give it as --label-smoothing",
        ),
        ({"close_mosaic": 99999999999999999999}, "x.yaml: close_mosaic: the number does not fit in 64 bits"),
    ],
)
def test_hyperparameters_are_checked(values, message):
    with refused(message):
        build(Hyperparameters, values, "x.yaml", unknown_key)


@pytest.mark.parametrize(
    "content", [{"name": "Blur", "p": None}, {"p": 1e-05, "on": True}, {"mode": "it's: #1", "n": "1"}]
)
def test_a_hyperparameter_that_a_message_shows_as_a_flag_reads_back_as_itself(content):
    """None was read back as the text 'None', and 1e-05 as text."""
    flag, override = words_of_settings({"albumentations": [content]})
    assert flag == "--set"
    assert with_overrides(Hyperparameters(), [override]).albumentations == [content]


def test_overrides_take_precedence_over_the_yaml(tmp_path):
    path = tmp_path / "hyp.yaml"
    path.write_text("lr0: 1e-3\nmosaic: 0\nalbumentations:\n- {name: Blur, p: 0.1}\n")
    hyp = hyperparameters_from(str(path), ["mosaic=0.5", "lrf=0.1"])
    assert (hyp.lr0, hyp.mosaic, hyp.lrf, hyp.scale) == (0.001, 0.5, 0.1, Hyperparameters().scale)
    assert hyp.albumentations == [{"name": "Blur", "p": 0.1}]
    assert build(Hyperparameters, dataclasses.asdict(hyp), "again") == hyp
    for wrong, message in (
        ("lr=0.01", "--set: unknown key 'lr' (did you mean 'lr0'?)"),
        ("lr0", "--set lr0: must be key=value"),
        ("lr0=", "--set lr0=: has no value; write null for none"),
        ("lr0=" + "[" * 100_000, "--set lr0=...nesting depth"),
    ):
        with refused(message):
            hyperparameters_from("", [wrong])


def test_the_listed_hyperparameters_are_the_defaults():
    path = ROOT / "configs" / "hyp" / "scratch.yaml"
    assert hyperparameters_from(str(path)) == Hyperparameters()
    text = path.read_text()
    for field in dataclasses.fields(Hyperparameters):
        assert f"# {field.metadata['help']}" in text, field.name
        assert f"\n{field.name}: " in text, field.name


def test_recipes_are_found_by_name_file_and_auto(tmp_path):
    scratch, finetune = (read_recipe("auto", pretrained=pretrained) for pretrained in (False, True))
    assert scratch == read_recipe("scratch", pretrained=True) == Hyperparameters()
    assert finetune == read_recipe("finetune", pretrained=False) != scratch
    kept = read_recipe("auto", pretrained=True, keep_old=True)
    assert kept == dataclasses.replace(finetune, lr_mult=0.03125)
    assert read_recipe("debug", ["mosaic=1"], pretrained=False).mosaic == 1
    (tmp_path / "own.yaml").write_text("mosaic: 0.25\n")
    for options in ({"pretrained": False}, {"pretrained": True}, {"pretrained": True, "keep_old": True}):
        usual = read_recipe("auto", **options)
        assert read_recipe(str(tmp_path / "own.yaml"), **options) == dataclasses.replace(usual, mosaic=0.25)
    (tmp_path / "own.yaml").write_text("lr_mult: 1.0\n")
    assert read_recipe(str(tmp_path / "own.yaml"), pretrained=True) == scratch
    (tmp_path / "own.yaml").write_text("")
    assert read_recipe(str(tmp_path / "own.yaml"), pretrained=True) == finetune
    for absent, message in (
        ("", "--hyp '': no such recipe or file; known: auto, debug, demo, finetune, keep_old, scratch"),
        ("fine-tune", "--hyp fine-tune: no such recipe or file (did you mean 'finetune'?)..."),
        ("hyp.scratch-low.yaml", "--hyp hyp.scratch-low.yaml: no such recipe or file; known..."),
    ):
        with refused(message):
            read_recipe(absent, pretrained=True)
