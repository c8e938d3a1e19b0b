"""The picture of a benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graftwork.cli import main
from graftwork.drawing.figures import Bar, bar_chart, svg_text
from graftwork.measuring.plots import bench_figure

pytest.importorskip("matplotlib")


def row(name: str, speed: float, **others: Any) -> dict[str, Any]:
    speeds = [speed - 1, speed, speed + 2]
    own = {"name": name, "target": "a", "tokens_per_second": speed, "ratio": speed / 10}
    return {**own, "tokens_per_second_all": speeds, "accepted_per_step": None, **others}


def test_a_bar_a_row_from_top_to_bottom() -> None:
    rows = [row("first", 10.0), row("<b>", 25.0, accepted_per_step=2.5, target="b")]
    figure = bench_figure({"rows": rows, "prompts": 3, "new_tokens": 8})
    (axis,) = figure.axes
    assert [bar.get_width() for bar in axis.patches] == [10.0, 25.0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["first", "<b>"]
    assert axis.yaxis_inverted()
    notes = [text.get_text() for text in axis.texts]
    assert notes == ["1.00 x", "2.50 x, 2.50 tokens a step"]
    assert "<b>" not in svg_text(figure).replace("<!-- <b> -->", "")


def test_one_series_has_no_legend() -> None:
    bars = [Bar("x", 1.0, 0.5, 1.5)]
    assert bar_chart(bars, "what", 1.0).axes[0].get_legend() is None


def test_bench_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"rows": [row("first", 10.0)], "prompts": 1, "new_tokens": 2}
    compared = "graftwork.measuring.compare.compare"
    monkeypatch.setattr(compared, lambda *args, **options: ("table", figures))
    plot = tmp_path / "bench.svg"
    with pytest.raises(SystemExit) as caught:
        main(["bench", "model", "--recipes", "baseline", "--plot", str(plot)])
    assert not caught.value.code and "<svg" in plot.read_text(encoding="utf-8")
