"""Tables of detections are joined and selected from."""

import numpy as np

from utils.detections import DetectionTable


def detections(images: list[int]) -> DetectionTable:
    number = np.array(images, np.int64)
    return DetectionTable(number, np.arange(4.0 * len(images)).reshape(-1, 4), number / 10, number % 3)


def test_detections_are_joined_and_selected():
    parts = [detections([4, 1]), detections([]), detections([2])]
    joined = DetectionTable.concatenate(parts)
    assert joined.image_index.tolist() == [4, 1, 2]
    assert joined.boxes_xyxy_px.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    chosen = joined.take(np.argsort(joined.image_index))
    assert (chosen.image_index.tolist(), chosen.scores.tolist()) == ([1, 2, 4], [0.1, 0.2, 0.4])
    assert chosen.take(chosen.classes == 2).image_index.tolist() == [2]
    for table in (DetectionTable.concatenate([]), DetectionTable.concatenate(parts[1:2])):
        assert [getattr(table, name).shape for name in table.__slots__] == [(0,), (0, 4), (0,), (0,)]
        assert table.image_index.dtype == table.classes.dtype == np.int64
