"""Draws a single plan."""

from __future__ import annotations

from data.augment.plan import SamplePlan, draw_plans
from utils.structures import SampleKey


def draw_plan(key: SampleKey, **settings: object) -> SamplePlan:
    """The plan of one sample; ``settings`` are those of `draw_plans`."""
    return draw_plans([key], **settings)[0]
