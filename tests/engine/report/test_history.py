"""Charts of results.csv."""

import numpy as np

from engine.report.history import history_charts


def columns(text: str) -> dict[str, np.ndarray]:
    names, *rows = (line.split(",") for line in text.splitlines())
    return dict(
        zip(names, np.array([[float(cell or "nan") for cell in row] for row in rows]).reshape(-1, len(names)).T)
    )


def test_columns_share_a_chart_by_what_they_measure():
    charts = history_charts(
        columns("epoch,train/box,val/box,metrics/AP50,lr/0,lr/1\n1,3,,,0.1,0.2\n2,2,2.5,nan,0.1,0.1")
    )
    assert [(chart.title, [line.name for line in chart.lines]) for chart in charts] == [
        ("box loss", ["train/box", "val/box"]),
        ("Learning rates", ["lr/0", "lr/1"]),
    ]
    assert history_charts(columns("epoch,train/box")) == []
