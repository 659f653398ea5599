"""Progress as a person reads it: plain lines where there is no terminal, nothing for short work."""

import io

import pytest
from nearline.workflows import progress as module
from nearline.workflows.progress import PlainProgress, duration_text, rate_text, short_duration_text
from rich.console import Console


def test_short_work_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.5, 1.9])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    with PlainProgress(stream) as progress:
        for done in (0, 50, 100):
            progress("harvest", done, 100, "tokens")
    assert stream.getvalue() == ""


def test_long_work_prints_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 11.0, 12.0, 40.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    with PlainProgress(stream) as progress:
        for done in (0, 2_200, 2_400, 8_000):
            progress("harvest", done, 8_000, "tokens")
    assert stream.getvalue().splitlines() == [
        "harvest: 2,200 of 8,000 tokens (200 tokens/s, 29 s left)",
        "harvest: 8,000 of 8,000 tokens (200 tokens/s, done in 40 s)",
    ]


def test_bar_shows_counts_on_a_terminal() -> None:
    stream = io.StringIO()
    with module.BarProgress(Console(file=stream, force_terminal=True, width=120)) as progress:
        progress("harvest", 10, 20, "tokens")
        progress("harvest", 20, 20, "tokens")
    assert "20/20 tokens" in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (61, "1 min 01 s"), (7325, "2 h 02 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.001, "under 0.1 s"),
        (0.79, "0.8 s"),
        (59.6, "60 s"),
        (59.9, "1.0 min"),
        (725, "12 min"),
        (3599, "1.0 h"),
        (11_556, "3.2 h"),
        (4e6, "1,111 h"),
    ],
)
def test_estimates_have_two_digits(seconds: float, text: str) -> None:
    assert short_duration_text(seconds) == text


@pytest.mark.parametrize(
    ("per_s", "text"),
    [
        (0.0, "0 steps/s"),
        (1234.4, "1,234 steps/s"),
        (1.26, "1.3 steps/s"),
        (0.25, "0.25 steps/s"),
        (0.04, "2.4 steps/min"),
        (1 / 3600, "1 steps/h"),
    ],
)
def test_slow_rates_have_two_digits(per_s: float, text: str) -> None:
    assert rate_text(per_s, "steps") == text


def test_what_was_there_already_says_no_rate_and_the_last_minute_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that goes on counts sixty kept steps at once, then takes 10 s a step, and later 100 s."""
    times = [0.0, 0.1, 10.1, 20.1, 30.1, 130.1, 230.1]
    clock = iter(times)
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    with PlainProgress(stream) as progress:
        for done in (30, 60, 61, 62, 63, 64, 65):
            progress("finetune", done, 100, "steps")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "finetune: 61 of 100 steps (0.1 steps/s, 6 min 30 s left)"
    assert lines[2] == "finetune: 63 of 100 steps (0.1 steps/s, 6 min 10 s left)"
    assert lines[4] == "finetune: 65 of 100 steps (0.6 steps/min, 58 min 20 s left)"


def test_the_same_stage_of_another_model_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 11.0, 20.0, 31.0, 40.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    with PlainProgress(stream) as progress:
        for done in (0, 1_000, 100, 1_200, 2_100):
            progress("fit", done, max(1_000, done), "rows")
    assert stream.getvalue().splitlines() == [
        "fit: 1,000 of 1,000 rows (91 rows/s, done in 11 s)",
        "fit: 1,200 of 1,200 rows (100 rows/s, done in 11 s)",
        "fit: 2,100 of 2,100 rows (100 rows/s, done in 20 s)",
    ]


def test_each_model_has_a_bar_of_its_own() -> None:
    stream = io.StringIO()
    with module.BarProgress(Console(file=stream, force_terminal=True, width=120)) as progress:
        for done, total in ((10, 20), (20, 20), (5, 30), (30, 30)):
            progress("fit", done, total, "rows")
    last = stream.getvalue().rpartition("20/20 rows")[2]
    assert "30/30 rows" in last
    assert "-" not in last.partition("30/30 rows")[2].partition("rows/s")[0]
