"""The targets of the fuzzer, and the required outcome of each input.

A target changes one file in a folder of its own, and calls the program on it as its scripts do. What is right is
decided by other means, in the modules of tests/robustness/targets. Whatever else must end in one line that names the
file. One target has no files: command lines.
"""

from __future__ import annotations

import functools

from tests.robustness.targets.caches import image_cache, index_cache
from tests.robustness.targets.case import Target
from tests.robustness.targets.checkpoints import checkpoints, safetensors
from tests.robustness.targets.command_lines import command_lines
from tests.robustness.targets.file_kinds import kinds
from tests.robustness.targets.images import images
from tests.robustness.targets.labels import labels
from tests.robustness.targets.yaml_files import data_yaml, model, recipe

TARGETS = {
    "images": Target(images, ("pictures",), 3.0),
    "yolo": Target(functools.partial(labels, kind="yolo"), ("labeled",), 3.0),
    "voc": Target(functools.partial(labels, kind="voc"), ("labeled",), 2.0),
    "coco": Target(functools.partial(labels, kind="coco"), ("labeled",), 2.0),
    "data-yaml": Target(data_yaml, ("labeled",), 2.0),
    "recipe": Target(recipe),
    "model": Target(model, ("labeled",)),
    "checkpoints": Target(checkpoints, ("checkpoints", "last"), 3.0),
    "safetensors": Target(safetensors, ("safetensors",), 2.0),
    "index-cache": Target(index_cache, ("index_cache",), 1.5),
    "image-cache": Target(image_cache, ("image_cache",)),
    "kinds": Target(kinds, ("labeled", "trained")),
    "command-lines": Target(command_lines),
}
