"""Folds and settings: groups stay whole and in balance, wrong settings are named."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nearline.analyze.compute import session
from nearline.analyze.folds import assign_folds, too_few_groups
from nearline.analyze.settings import FitSettings, parse
from nearline.analyze.tasks import block_ranges, task_bytes
from nearline.store import EnvironmentFault, UsageError
from nearline.store.settings import parse_bytes, parse_layers


@given(st.lists(st.integers(1, 300), min_size=8, max_size=60), st.integers(2, 8), st.integers(0, 5))
def test_folds_are_whole_balanced_and_independent_of_order(rows: list[int], n_folds: int, seed: int) -> None:
    hashes = [f"{index:032x}" for index in range(len(rows))]
    folds = assign_folds(hashes, np.array(rows), n_folds, seed)
    filled = np.bincount(folds, weights=rows, minlength=n_folds)
    assert (filled > 0).all()
    assert filled.max() - filled.min() <= max(rows)
    turned = assign_folds(hashes[::-1], np.array(rows[::-1]), n_folds, seed)
    np.testing.assert_array_equal(turned[::-1], folds)


def test_the_seed_moves_folds() -> None:
    hashes, rows = [f"{index:032x}" for index in range(40)], np.ones(40, np.int64)
    assert (assign_folds(hashes, rows, 5, 0) != assign_folds(hashes, rows, 5, 1)).any()


def test_too_few_groups_are_refused() -> None:
    with pytest.raises(UsageError, match="only 4 groups of documents have rows to fit, too few for 5 folds"):
        assign_folds(["a", "b", "c", "d"], np.ones(4, np.int64), 5, 0)


def test_what_to_do_about_too_few_groups() -> None:
    few = str(too_few_groups(3, 5, n_stored=5, n_corpus=80))
    assert "rows come from 5 of the 80 groups in its corpus: harvest more `tokens`, or set `keep` to a" in few
    assert few.endswith(" smaller share, or set `folds` to 3 or less")
    assert str(too_few_groups(2, 5, 2, 9)).endswith("set `folds` to 2")
    all_there = str(too_few_groups(1, 2, n_stored=4, n_corpus=4))
    assert all_there.startswith("only 1 group of documents has rows to fit, too few for 2 folds; ")
    assert all_there.endswith(": harvest a corpus with more documents")
    assert "no group of documents has rows" in str(too_few_groups(0, 2, 1, 1))


@given(st.integers(1, 10**9), st.integers(1, 400), st.integers(1, 9000))
def test_ranges_hold_every_block_once(n_rows: int, n_blocks: int, d: int) -> None:
    ranges = block_ranges(n_rows, n_blocks, d)
    assert [block for blocks in ranges for block in blocks] == list(range(n_blocks))
    assert all(len(blocks) > 0 for blocks in ranges)


def test_memory_is_arithmetic_beforehand() -> None:
    with session(FitSettings(workers=8, memory_limit="16 GiB")) as workers:
        assert workers.at_once(task_bytes(576, 4096, 5), "a layer") == 8
    with session(FitSettings(workers=64, memory_limit="16 GiB")) as workers:
        assert 1 <= workers.at_once(task_bytes(4096, 4096, 5), "a layer") < 64
    with session(FitSettings(memory_limit="1 GiB")) as workers:
        with pytest.raises(EnvironmentFault, match="raise `memory_limit`"):
            workers.at_once(task_bytes(8192, 4096, 5), "a layer")


@pytest.mark.parametrize(
    ("given_settings", "words"),
    [
        ({"linear_att": 0.9}, "unknown setting 'linear_att': did you mean 'linear_at'?"),
        ({"linear_at": 1.5}, "linear_at=1.5"),
        ({"alpha": "best"}, "alpha='best'"),
        ({"alpha": -1.0}, "alpha=-1.0"),
        ({"alphas": [1.0, 0.1]}, "alphas="),
        ({"folds": 1}, "folds=1"),
        ({"layers": "3-1"}, "runs backwards"),
        ({"layers": "one"}, "no layer or range"),
        ({"memory_limit": "much"}, "no size"),
    ],
)
def test_wrong_settings_are_named(given_settings: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(given_settings)
    assert words in str(caught.value)


def test_settings_are_read() -> None:
    assert parse({"alpha": "paper"}).rules == ("paper",)
    assert parse({"alpha": 0.01}).rules == (0.01,)
    assert parse({}).rules == FitSettings().alphas
    assert parse({"alphas": "1e-3, 0.1"}).alphas == (1e-3, 0.1)
    assert parse({"layers": [0, 2]}).layers == "0,2"
    assert parse_layers("0-2, 5") == [0, 1, 2, 5]
    assert parse_bytes("1.5 GiB") == 3 * 2**29
    assert parse({"workers": 3}).results() == parse({"memory_limit": "1 GB"}).results()
    assert parse({"seed": 3}).results() != parse({}).results()
