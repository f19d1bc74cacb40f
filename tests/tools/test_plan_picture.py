"""The picture of a plan: what is drawn, read from the figure itself."""

from __future__ import annotations

import pytest
from test_plan_verdict import estimate, job

from bridge_fgo.tools.bench.plots import agg_pyplot
from bridge_fgo.tools.job.parallel import Parallel
from bridge_fgo.tools.plan.picture import figure_of
from bridge_fgo.tools.plan.verdict import MEMORY, Outcome, verdicts

GB = 10**9


@pytest.fixture(autouse=True)
def no_activations_counted(monkeypatch):
    monkeypatch.setattr("bridge_fgo.tools.plan.estimate.activation_bytes", lambda job, stage: None)


@pytest.fixture
def drawn():
    """Returns the axes of an estimate's figure, and whatever of it reaches beyond the picture's edge."""
    pyplot = agg_pyplot()

    def draw(*arguments, **changes):
        figure = figure_of(estimate(*arguments, **changes), pyplot)
        figure.canvas.draw()
        (axes,) = figure.axes
        whole = figure.bbox.padded(1)
        artists = (axes.title, axes.get_legend(), axes.yaxis.label, *axes.texts)
        extents = {artist: artist.get_window_extent() for artist in artists}
        beyond = [a for a, box in extents.items() if not (whole.contains(*box.min) and whole.contains(*box.max))]
        return axes, beyond

    yield draw
    pyplot.close("all")


def lines_at(axes, style: str = "--") -> list[float]:
    return [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == style]


def test_the_line_is_the_memory_of_the_system_asked_for_and_the_difference_is_written(drawn):
    axes, beyond = drawn(8.0, 20.0, system="H200")
    assert lines_at(axes) == [MEMORY["H200"][0] / GB] and beyond == []
    texts = [text.get_text() for text in axes.texts]
    # 8 billion parameters: 18 bytes each, of which 12 leave; 20 GB of activations, 0.1 of workspaces.
    assert texts == ["164.1", "68.1\n(\N{MINUS SIGN}96.0)", "H200: 151 GB", "room 141 GB"]


def test_without_a_system_the_lines_next_to_the_highest_bar_are_drawn(drawn):
    axes, _ = drawn(8.0, 20.0)
    assert lines_at(axes) == [MEMORY["H200"][0] / GB, MEMORY["B200"][0] / GB]


def test_a_bar_that_fits_only_with_the_offload_ends_above_the_room(drawn):
    (found,) = verdicts(estimate(7.0, 20.0, system="H200"))
    axes, beyond = drawn(7.0, 20.0, system="H200")
    (room,) = lines_at(axes, ":")
    resident = float(axes.texts[0].get_text())
    assert found.outcome is Outcome.with_offload and room == found.room / GB
    assert room < resident < lines_at(axes)[0] and beyond == []


def test_sixteen_stages_are_drawn_whole_and_no_text_lies_on_another(drawn):
    chunk = job(8.0, 20.0).stages[0]
    pipeline = Parallel(gpus=16, tensor=1, pipeline=16, context=1, expert=1, expert_tensor=1)
    axes, beyond = drawn(8.0, 20.0, system="H200", stages=[chunk] * 16, parallel=pipeline)
    boxes = [text.get_window_extent() for text in (*axes.texts, *axes.get_xticklabels())]
    assert len(axes.get_xticks()) == 16 and beyond == []
    assert not any(box.overlaps(other) for i, box in enumerate(boxes) for other in boxes[i + 1 :])


def test_memory_far_above_is_said_and_does_not_flatten_the_bars(drawn):
    axes, beyond = drawn(0.1, 0.1, system="H200")
    assert list(axes.lines) == []
    assert axes.texts[-1].get_text() == "H200: 151 GB, far above" and axes.get_ylim()[1] < 3 and beyond == []


def test_the_legend_has_what_can_be_seen_and_the_title_is_whole(drawn):
    axes, beyond = drawn(8.0, None, system="H200")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "parameters", "gradients", "masters", "moments"
    ]  # fmt: skip
    assert "not known" in axes.get_title() and beyond == []
