"""Hyper-parameters by name: the recipes of ``configs/hyp``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from utils.config import Hyperparameters, hyperparameters_from, suggestion
from utils.errors import UserError

FOLDER = Path(__file__).parents[1] / "configs" / "hyp"


def recipe_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_recipe(hyp: str, overrides: Sequence[str] = (), *, pretrained: bool) -> Hyperparameters:
    """What ``--hyp`` means, with ``key=value`` overrides on top.

    Args:
        hyp: "auto", a recipe's name, or a YAML file.
        pretrained: the run starts from weights. For "auto" that decides; the optimiser is chosen by the number of steps
            (`engine.optim.choose_optimizer`), since that is known once the data is.

    Raises UserError for what is neither a recipe nor a file.
    """
    if hyp == "auto":
        hyp = "finetune" if pretrained else "scratch"
    if hyp in recipe_names():
        return hyperparameters_from(str(FOLDER / f"{hyp}.yaml"), overrides)
    if not Path(hyp).suffix and not Path(hyp).exists():
        known = ", ".join(["auto", *recipe_names()])
        raise UserError(f"--hyp {hyp}: no such recipe or file{suggestion(hyp, recipe_names())}; known: {known}")
    return hyperparameters_from(hyp, overrides)
