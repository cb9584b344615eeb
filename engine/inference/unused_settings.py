"""The table of settings of val.py and detect.py that have no effect; engine/train/check_settings.py has train.py's."""

from __future__ import annotations

from engine.inference.model import InferenceModel
from models.postprocess.tiles import Tiles
from utils.config.flags import as_flag, unused_lines
from utils.config.settings import DetectConfig, ValConfig, changed_settings


def unused_settings(config: ValConfig | DetectConfig, model: InferenceModel, tiles: Tiles | None) -> list[str]:
    """Returns a line for each setting that differs from its default and has no effect with this model. ``tiles``: those
    into which images are cut; None: whole images."""
    needs_nms = model.nms_iou is not None
    table: list[tuple[str, bool, str]] = [
        ("nms", not model.is_unscored_branch, ": the model has one branch"),
        ("box_voting", not needs_nms, ": its detections need no NMS"),
        ("overlap tile_full_image", tiles is None, ": images are not cut into tiles"),
        ("tile_full_image", tiles is not None and tiles.scaled, ": the tiles of the training have no whole image"),
    ]
    if isinstance(config, ValConfig):
        table += [
            ("rect", model.input_hw is not None, ": the exported model takes images of one size"),
            ("spawn", config.spawn == 1, ": one process scores anyway"),
        ]
    else:
        draws = not config.nosave or config.view_img
        table += [
            ("agnostic_nms", needs_nms and len(model.names) == 1, ": the model has one class"),
            ("save_conf", not config.save_txt, " without --save-txt"),
            ("save_conf", config.save_txt and bool(config.track), ": the files of --track have it anyway"),
            ("line_thickness hide_labels hide_conf", not draws, ": nothing is drawn"),
        ]
    return unused_lines(table, {name: as_flag(name, value) for name, value in changed_settings(config).items()})
