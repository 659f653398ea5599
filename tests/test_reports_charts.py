"""Charts as values: what they draw is read from to_dict(), which validates them; few are rendered."""

import json
import re
from typing import Any

import altair as alt
import polars as pl
import pytest
import vl_convert
from helpers_reports import make_results, make_tables
from hypothesis import given
from hypothesis import strategies as st
from nearline.reports import charts, compact, multiples, svg
from nearline.reports.chart_style import NARROW, WIDE, Size, colour_of, shape_of
from nearline.reports.results import Results

CLAIM_AT = 0.9


@pytest.fixture(scope="module")
def results() -> Results:
    return make_results(make_tables())


def marks(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Every unit chart inside a specification, with the data it inherits."""
    parts = [part for key in ("layer", "vconcat", "concat") for part in spec.get(key, [])]
    inherited = {"data": spec["data"]} if "data" in spec else {}
    return [mark for part in parts for mark in marks(inherited | part)] if parts else [spec]


def rows_of(spec: dict[str, Any], mark: dict[str, Any]) -> list[dict[str, Any]]:
    return spec["datasets"][mark["data"]["name"]]


def all_charts(results: Results, size: Size) -> dict[str, alt.TopLevelMixin]:
    errors = results.errors()
    bins = results.histogram.filter(pl.col("need") == "error").with_columns(density=pl.col("count") / 100.0)
    return {
        "r2": charts.held_out_r2(results.surrogates, claim_at=CLAIM_AT, size=size),
        "need": charts.need_quantiles(errors, size=size),
        "shares": charts.shares_below(errors, size=size),
        "skew": charts.skew(errors, size=size),
        "histograms": charts.histograms(bins, [(0, "layer 0"), (5, "layer 5")], upto=1.2, size=size),
    }


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("name", ["r2", "need", "shares", "skew", "histograms"])
def test_axes_have_titles_with_units_and_colours_follow_the_page(
    results: Results, name: str, size: Size
) -> None:
    spec = all_charts(results, size)[name].to_dict()
    titles = {
        encoding["title"]
        for mark in marks(spec)
        for channel, encoding in mark.get("encoding", {}).items()
        if channel in ("x", "y") and encoding.get("title")
    }
    assert titles
    assert all(re.search(r"\[.+\]$", title) for title in titles)
    assert spec["config"]["background"] == "transparent"
    colours = set(re.findall(r"#[0-9a-f]{3,8}\b", json.dumps(spec)))
    assert all(re.search(rf"var\(--\w+,{colour}\)", json.dumps(spec)) for colour in colours)
    # Names of stores never reach the renderer: vl-convert aborts on strings that XML cannot hold.
    assert "gpt2-python" not in json.dumps(spec)


def test_r2_has_point_both_intervals_and_the_threshold(results: Results) -> None:
    spec = charts.held_out_r2(results.surrogates, claim_at=CLAIM_AT).to_dict()
    found = marks(spec)
    spans = [
        (mark["encoding"]["y"]["field"], mark["encoding"]["y2"]["field"])
        for mark in found
        if "y2" in mark["encoding"]
    ]
    assert spans == [("r2_sim_lo", "r2_sim_hi"), ("r2_lo", "r2_hi")]
    points = [mark for mark in found if mark["mark"]["type"] == "point"]
    assert [mark["encoding"]["y"]["field"] for mark in points] == ["r2_test"]
    rule = next(mark for mark in found if mark["mark"]["type"] == "rule" and "y2" not in mark["encoding"])
    assert [row["at"] for row in rows_of(spec, rule)] == [CLAIM_AT]
    drawn = {(row["series"], row["layer"]): row["r2_test"] for row in rows_of(spec, points[0])}
    stored = {(row["series"], row["layer"]): row["r2_test"] for row in results.surrogates.to_dicts()}
    assert drawn == stored


def test_every_store_has_a_colour_and_a_shape_of_its_own() -> None:
    looks = [(colour_of(series), shape_of(series)) for series in range(36)]
    assert len(set(looks)) == 36
    assert len({shape for _, shape in looks[:6]}) == len({colour for colour, _ in looks[:6]}) == 6


def test_a_failed_fit_does_not_flatten_the_others(results: Results) -> None:
    bad = results.surrogates.with_columns(
        r2_test=pl.when(pl.col("layer") == 2).then(-300.0).otherwise(pl.col("r2_test")),
        r2_sim_lo=pl.when(pl.col("layer") == 2).then(-900.0).otherwise(pl.col("r2_sim_lo")),
    )
    spec = charts.held_out_r2(bad, claim_at=CLAIM_AT).to_dict()
    point = next(mark for mark in marks(spec) if mark["mark"]["type"] == "point")
    assert point["encoding"]["y"]["scale"]["domain"] == [charts.FLOOR, 1.0]
    assert min(row["r2_test"] for row in rows_of(spec, point)) == charts.FLOOR


def test_layers_keep_their_numbers_and_crowded_axes_name_fewer() -> None:
    many = make_results(make_tables(("one",), n_layers=48))
    few = make_results(make_tables(("one",), n_layers=6))
    sparse = many.surrogates.filter(pl.col("layer").is_in([3, 7, 40]))

    def named(frame: pl.DataFrame, size: Size) -> list[int]:
        spec = charts.held_out_r2(frame, claim_at=CLAIM_AT, size=size).to_dict()
        return next(m["encoding"]["x"]["axis"]["values"] for m in marks(spec) if m["mark"]["type"] == "point")

    assert named(few.surrogates, NARROW) == list(range(6))
    assert named(sparse, WIDE) == [3, 7, 40]
    assert named(many.surrogates, NARROW) == list(range(0, 48, 5))


def test_outlines_end_at_the_axis(results: Results) -> None:
    bins = results.histogram.with_columns(density=pl.col("count").cast(pl.Float64))
    spec = charts.histograms(bins, [(0, "layer 0")], upto=0.7).to_dict()
    rows = rows_of(spec, marks(spec)[0])
    assert max(row["bin_lo"] for row in rows) == 0.7
    assert {row["series"] for row in rows if row["bin_lo"] == 0.7} == {0, 1}


def test_missing_intervals_are_not_drawn_as_zero(results: Results) -> None:
    none = results.surrogates.with_columns(
        pl.lit(None, pl.Float64).alias(name) for name in ("r2_lo", "r2_hi", "r2_sim_lo", "r2_sim_hi")
    )
    drawn = svg.render(charts.held_out_r2(none, claim_at=CLAIM_AT, size=NARROW), "no intervals")
    assert "NaN" not in drawn
    assert drawn.count("<path") > 0


def test_svg_says_its_sentence_and_is_the_same_twice(results: Results) -> None:
    chart = charts.need_quantiles(results.errors(), size=NARROW)
    first, second = (svg.render(chart, 'a "finding" <b>&') for _ in range(2))
    assert first == second
    assert first.startswith('<svg role="img" aria-label="a &quot;finding&quot; &lt;b&gt;&amp;" viewBox="0 0 ')
    assert "<title>a &quot;finding&quot; &lt;b&gt;&amp;</title>" in first
    assert not re.search(r"clip-path|url\(|http|<script|\bid=", first)


def test_text_that_xml_cannot_hold_is_refused_before_the_renderer_aborts() -> None:
    chart = alt.Chart(pl.DataFrame({"x": [1], "name": ["a\x00b"]})).mark_text().encode(x="x:Q", text="name:N")
    with pytest.raises(ValueError, match=r"pass it through text\.visible"):
        svg.render(chart, "x")


def test_an_interval_without_end_and_a_layer_without_r2_are_drawn() -> None:
    frame = pl.DataFrame(
        {
            "series": [0, 0, 0],
            "layer": [0, 1, 2],
            "r2_test": [0.93, 0.03, float("nan")],
            "r2_lo": [0.92, -3.6, float("nan")],
            "r2_hi": [0.94, 0.99, float("nan")],
            "r2_sim_lo": [0.91, float("-inf"), float("nan")],
            "r2_sim_hi": [0.95, 1.0, float("nan")],
        }
    )
    assert charts.floor_of(frame, 0.9) == charts.FLOOR
    assert "Infinity" not in json.dumps(charts.held_out_r2(frame, claim_at=0.9).to_dict())


# Small multiples


def panels_of(n_layers: int, n_series: int = 1, *names: str) -> list[multiples.Panel]:
    rows = [
        {"series": series, "layer": layer, "v": 0.6 + 0.001 * layer, "lo": 0.55, "hi": 0.65}
        for series in range(n_series)
        for layer in range(n_layers)
    ]
    return [multiples.panel(name, pl.DataFrame(rows), "v", ("lo", "hi")) for name in names or ("input",)]


def unit_marks(chart: alt.TopLevelMixin) -> list[dict[str, Any]]:
    return chart.to_dict()["spec"]["layer"]


def kinds(chart: alt.TopLevelMixin) -> list[str]:
    return [layer["mark"]["type"] for layer in unit_marks(chart)]


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_intervals_are_strokes_until_these_would_touch(size: Size) -> None:
    few, many = (
        multiples.by_layer(
            panels_of(n, 3, *"abcd"), axis="AUC [1]", domain=(0.4, 1.0), rule=0.5, columns=(4, 2), size=size
        )
        for n in (3, 48)
    )
    assert kinds(few) == ["rule", "rule", "line", "point"]
    assert kinds(many) == ["rule", "area", "line"]
    assert few.to_dict()["title"]["text"] == "AUC [1] by layer [index]"
    assert re.search(r"\b0\.5\b", json.dumps(unit_marks(few)[0]["transform"]))


def test_a_single_layer_is_a_point() -> None:
    one = multiples.by_layer(panels_of(1, 1, *"abcdefgh"), axis="AUC [1]", domain=(0.4, 1.0))
    assert "point" in kinds(one)


def test_what_comes_too_late_is_drawn_in_broken_lines() -> None:
    early, late = panels_of(4, 1, "norm", "output_norm")
    drawn = multiples.by_layer(
        [early, multiples.Panel(late.title, late.frame, faint=True)], axis="AUC [1]", domain=(0.4, 1.0)
    )
    spec = drawn.to_dict()
    rows = next(iter(spec["datasets"].values()))
    assert {(row["title"], row["dash"]) for row in rows} == {("norm", "in time"), ("output_norm", "late")}
    line = next(mark for mark in unit_marks(drawn) if mark["mark"]["type"] == "line")
    assert line["encoding"]["strokeDash"]["scale"]["range"] == [[1, 0], [3, 2]]


def test_panels_of_one_name_stay_apart() -> None:
    drawn = multiples.by_layer(panels_of(2, 1, "same", "same"), axis="AUC [1]", domain=(0.4, 1.0)).to_dict()
    rows = next(iter(drawn["datasets"].values()))
    assert {row["title"] for row in rows} == {"same", "same (2)"}


def test_axes_hold_the_values_within_bounds_and_cut_what_lies_beyond() -> None:
    frame = pl.DataFrame({"series": [0, 0], "layer": [0, 1], "v": [0.62, -300.0], "lo": [None, None]})
    panels = [multiples.panel("r", frame.cast({"lo": pl.Float64}), "v", ("lo", "lo"))]
    domain = multiples.domain_of(panels, (-1.0, 1.0), show=(0.0,))
    assert domain == (-1.0, 0.7)
    assert multiples.cut(panels, domain)
    assert not multiples.cut(panels, (-300.0, 1.0))
    rows = next(iter(multiples.by_layer(panels, axis="r [1]", domain=domain).to_dict()["datasets"].values()))
    assert min(row["value"] for row in rows) == -1.0
    nothing = [multiples.Panel("r", panels[0].frame.clear())]
    assert multiples.domain_of(nothing, (0.0, 1.0)) == (0.0, 1.0)


def test_curves_have_their_diagonal_in_every_panel() -> None:
    frame = pl.DataFrame({"series": [0, 0, 0], "share": [0.0, 0.5, 1.0], "v": [0.0, 0.2, 1.0]})
    panels = [multiples.panel(name, frame, "v", x="share") for name in ("layer 0", "layer 3")]
    chart = multiples.curves(
        panels, axes=("tokens [%]", "need [%]"), domain=(0.0, 1.0), across=(0.0, 1.0), diagonal=True
    )
    drawn = svg.render(chart, "curves")
    assert drawn.count("stroke-dasharray") == 2
    assert "NaN" not in drawn


def test_counts_on_an_axis_are_written_out_and_the_last_one_is() -> None:
    """`1.237k` is no way to write 1,237; where labels would touch, the lower one goes."""
    tokens = [1_237, 2_662, 5_000, 5_300]
    frame = pl.DataFrame({"series": [0] * 4, "n": tokens, "v": [0.1, 0.2, 0.3, 0.3]})
    chart = multiples.curves(
        [multiples.panel(name, frame, "v", x="n") for name in ("layer 0", "layer 3", "layer 5")],
        axes=("tokens fitted [1]", "R² [1]"),
        domain=(0.0, 1.0),
        logarithmic=True,
    )
    shown = re.findall(r">([^<]+)</text>", svg.render(chart, "curves"))
    assert [shown.count(one) for one in ("1,237", "2,662", "5,000", "5,300")] == [3, 3, 0, 3]


# The drawing in fewer bytes


def points_of(d: str) -> list[tuple[float, float]]:
    """The corners of a path of straight steps, as a slow reader would follow them."""
    at, found = (0.0, 0.0), []
    for letter, words in re.findall(r"([MLl])([^A-Za-z]*)", d):
        numbers = [float(one) for one in re.findall(r"-?(?:\d+\.?\d*|\.\d+)", words)]
        base = at if letter == "l" else (0.0, 0.0)
        at = (numbers[0] + base[0], numbers[1] + base[1])
        found.append(at)
    return found


@given(
    st.lists(st.tuples(*[st.floats(-900, 900, allow_subnormal=False)] * 2), min_size=1, max_size=30),
    st.floats(-50, 50),
    st.floats(-50, 50),
)
def test_a_compact_path_is_where_the_long_one_was(corners: list[Any], x: float, y: float) -> None:
    long = "M" + "L".join(f"{px},{py}" for px, py in corners)
    short = compact.path(long, x, y)
    for (sx, sy), (px, py) in zip(points_of(short), corners, strict=True):
        assert abs(sx - (px + x)) <= 0.05 + 1e-9
        assert abs(sy - (py + y)) <= 0.05 + 1e-9


def test_steps_arcs_and_ends_keep_their_meaning() -> None:
    assert compact.path("M1,2H4V6h-3v-4Z", 10, 20) == "M11 22l3 0l0 4l-3 0l0-4Z"
    assert compact.path("M3.5,0A3.5,3.5,0,1,1,-3.5,0A3.5,3.5,0,1,1,3.5,0", 100, 50) == (
        "M103.5 50a3.5 3.5 0 11-7 0a3.5 3.5 0 117 0"
    )
    assert compact.path("M0,0C1,2,3,4,5,6", 0.25, 0) == "M.2 0c1 2 3 4 5 6"


def test_like_neighbours_share_a_path_and_order_stays() -> None:
    red, blue = 'stroke="red" opacity="1"', 'stroke="blue"'
    body = (
        '<g fill="none" transform="translate(10,5)"><g class="a">'
        f'<line transform="translate(1,2)" x2="3" y2="0" {red}/><line x2="1" y2="1" {red}/>'
        f'<path d="M0,0L1,1" {blue}/><line x2="2" y2="2" {red}/><path class="background" d="M0,0h9v9h-9Z"/>'
        '<text transform="translate(4,4)" fill="ink">a &lt; b</text>'
        '<text transform="translate(0,9) rotate(-90)" fill="ink">up</text></g></g></svg>'
    )
    assert compact.compact(body) == (
        '<g fill="none"><path stroke="red" d="M11 7l3 0M10 5l1 1"/><path stroke="blue" d="M10 5l1 1"/>'
        '<path stroke="red" d="M10 5l2 2"/><g fill="ink"><text x="14" y="9">a &lt; b</text></g>'
        '<g transform="translate(10,5)"><text transform="translate(0,9) rotate(-90)" fill="ink">up</text></g>'
        "</g>"
    )


def test_a_drawing_is_at_most_half_as_long_and_shows_the_same_words(results: Results) -> None:
    chart = charts.shares_below(results.errors(), size=WIDE)
    whole = vl_convert.vegalite_to_svg(chart.to_dict())
    short = svg.render(chart, "x")
    assert len(short) < len(whole) / 2
    words = [re.findall(r">([^<]+)</text>", one) for one in (whole, short)]
    assert words[0] == words[1]
