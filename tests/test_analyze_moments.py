"""Streaming moments equal the two-pass definition, whatever the chunks and the order of joining."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nearline.analyze.moments import (
    MomentBuffers,
    Moments,
    MomentSums,
    empty,
    from_rows,
    merge,
    merge_all,
    without,
)

# Products run in float32 on centred rows: each term is rounded by 6e-8, sums of many terms by less than this.
TOLERANCE = 2e-6
# Joining runs in float64 throughout.
EXACT = 1e-12


def rows(n: int, d: int, t: int, seed: int, offset: float = 5.0) -> tuple[np.ndarray, np.ndarray]:
    """Correlated rows far from the origin, one feature a hundred times larger than the rest."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, d)) @ rng.standard_normal((d, d)) + offset
    x[:, 0] *= 100.0
    y = np.tanh(x[:, :t] + rng.standard_normal((n, t))) - offset
    return x.astype(np.float32), y.astype(np.float32)


def two_pass(x: np.ndarray, y: np.ndarray) -> Moments:
    """The definition, in float64."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    mean_x, mean_y = x.mean(axis=0), y.mean(axis=0)
    xc, yc = x - mean_x, y - mean_y
    return Moments(len(x), mean_x, mean_y, xc.T @ xc, xc.T @ yc, (yc**2).sum(axis=0))


def assert_close(found: Moments, wanted: Moments, tolerance: float) -> None:
    """Compared in units of the features' own spreads, so that a large feature hides no small one."""
    assert found.n == wanted.n
    sx, sy = np.sqrt(np.diag(wanted.cxx)), np.sqrt(wanted.cyy)
    sx[sx == 0], sy[sy == 0] = 1.0, 1.0
    np.testing.assert_allclose((found.mean_x - wanted.mean_x) / sx, 0, atol=tolerance)
    np.testing.assert_allclose((found.mean_y - wanted.mean_y) / sy, 0, atol=tolerance)
    np.testing.assert_allclose((found.cxx - wanted.cxx) / np.outer(sx, sx), 0, atol=tolerance)
    np.testing.assert_allclose((found.cxy - wanted.cxy) / np.outer(sx, sy), 0, atol=tolerance)
    np.testing.assert_allclose(found.cyy / sy**2, wanted.cyy / sy**2, atol=tolerance)


@given(
    cuts=st.lists(st.integers(0, 400), max_size=6),
    buffer_rows=st.integers(2, 500),
    seed=st.integers(0, 5),
)
def test_any_chunking_gives_the_two_pass_moments(cuts: list[int], buffer_rows: int, seed: int) -> None:
    x, y = rows(400, 6, 4, seed)
    sums = MomentSums(MomentBuffers(6, 4, buffer_rows=buffer_rows))
    edges = [0, *sorted(cuts), 400]
    for start, stop in itertools.pairwise(edges):
        sums.add(x[start:stop], y[start:stop])
    assert_close(sums.finish(), two_pass(x, y), TOLERANCE)


@given(st.permutations(range(5)), st.integers(0, 3))
def test_any_order_of_joining_gives_the_same_moments(order: list[int], seed: int) -> None:
    x, y = rows(300, 5, 3, seed)
    parts = [two_pass(x[k::5], y[k::5]) for k in range(5)]
    assert_close(merge_all([parts[k] for k in order]), two_pass(x, y), EXACT)
    left = merge(merge(parts[0], parts[1]), parts[2])
    assert_close(merge(left, merge(parts[3], parts[4])), two_pass(x, y), EXACT)


def test_the_same_chunks_give_the_same_bytes() -> None:
    x, y = rows(5000, 24, 24, 0)
    first, second = from_rows(x, y), from_rows(x.copy(), y.copy())
    for name in ("mean_x", "mean_y", "cxx", "cxy", "cyy"):
        assert getattr(first, name).tobytes() == getattr(second, name).tobytes()


def test_rows_that_drift_are_joined_without_loss() -> None:
    """Each buffer has another mean, a thousand spreads away: the between-part term carries it all."""
    rng = np.random.default_rng(0)
    parts = [(rng.standard_normal((64, 4)) + 1000 * k).astype(np.float32) for k in range(6)]
    x = np.concatenate(parts)
    sums = MomentSums(MomentBuffers(4, 4, buffer_rows=64))
    sums.add(x, x)
    assert_close(sums.finish(), two_pass(x, x), TOLERANCE)


def test_an_index_picks_rows_and_buffers_are_free_afterwards() -> None:
    x, y = rows(500, 5, 3, 1)
    buffers = MomentBuffers(5, 3, n_sums=2, buffer_rows=70)
    for picks in ([np.arange(0, 500, 2), np.arange(1, 500, 2)], [np.arange(100), np.arange(100, 500)]):
        sums = buffers.sums()
        for part, index in zip(sums, picks, strict=True):
            part.add(x, y, index)
        found = [part.finish() for part in sums]
        for part, index in zip(found, picks, strict=True):
            assert_close(part, two_pass(x[index], y[index]), TOLERANCE)


# A fold leaves most rows; the few rows that are left of a large whole would hold its rounding, not their own.
@given(st.integers(0, 200), st.integers(0, 3))
def test_taking_a_part_out_is_never_having_put_it_in(n_part: int, seed: int) -> None:
    x, y = rows(300, 5, 3, seed)
    part, rest = from_rows_exact(x[:n_part], y[:n_part]), from_rows_exact(x[n_part:], y[n_part:])
    assert_close(without(merge(part, rest), part), rest, 1e-9)


def from_rows_exact(x: np.ndarray, y: np.ndarray) -> Moments:
    return two_pass(x, y) if len(x) else empty(x.shape[1], y.shape[1])


def test_no_rows_are_neutral_and_too_many_cannot_be_taken() -> None:
    x, y = rows(50, 4, 4, 2)
    some = two_pass(x, y)
    assert_close(merge(empty(4, 4), some), some, EXACT)
    assert_close(merge(some, empty(4, 4)), some, EXACT)
    assert MomentSums(MomentBuffers(4, 4)).finish().n == 0
    with pytest.raises(ValueError, match="cannot take 50 rows out of 10"):
        without(two_pass(x[:10], y[:10]), some)
