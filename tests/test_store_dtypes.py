"""Storage dtypes: what is stored is what was given, rounded to nearest even; no overflow is silent."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nearline.store import OutOfRange, UsageError, array_name, decode, encode, numpy_dtype

PATTERNS = np.arange(65536, dtype=np.uint16)


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint32)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's own cast of signalling NaN
def test_decode_float16_is_the_cast_of_numpy_for_every_pattern() -> None:
    for stored in (PATTERNS.view(np.float16), np.resize(PATTERNS, 300_001).view(np.float16)[::3]):
        assert np.array_equal(bits(decode(stored, "float16")), bits(stored.astype(np.float32)))


def test_decode_bfloat16_is_the_upper_half_for_every_pattern() -> None:
    assert np.array_equal(bits(decode(PATTERNS, "bfloat16")), PATTERNS.astype(np.uint32) << 16)


def test_encode_gives_back_every_pattern_that_is_no_nan() -> None:
    half, brain = PATTERNS.view(np.float16), decode(PATTERNS, "bfloat16")
    half, keep = half[~np.isnan(half)], ~np.isnan(brain)
    assert np.array_equal(encode(half.astype(np.float32), "float16").view(np.uint16), half.view(np.uint16))
    assert np.array_equal(encode(brain[keep], "bfloat16"), PATTERNS[keep])
    assert np.isnan(decode(encode(brain[~keep], "bfloat16"), "bfloat16")).all()


@given(st.lists(st.integers(0, 0xFF7EFFFF), min_size=1, max_size=50))
def test_bfloat16_rounds_to_the_nearest_even(patterns: list[int]) -> None:
    finite = [pattern for pattern in patterns if not 0x7F7F0000 <= pattern < 0x80000000]
    given = np.array(finite, dtype=np.uint32).view(np.float32)
    found = encode(given, "bfloat16").astype(np.int64)
    low = bits(given).astype(np.int64) >> 16
    rest = bits(given).astype(np.int64) & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (low % 2 == 1))
    assert np.array_equal(found, low + up)


def test_nan_payloads_that_would_round_to_infinity_stay_nan() -> None:
    tricky = np.array([0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF], dtype=np.uint32).view(np.float32)
    assert np.isnan(decode(encode(tricky, "bfloat16"), "bfloat16")).all()
    assert np.array_equal(bits(encode(tricky, "float32")), bits(tricky))


@pytest.mark.parametrize(
    ("dtype", "value"), [("float16", 70000.0), ("float16", -65520.0), ("bfloat16", 3.4e38)]
)
def test_a_finite_value_beyond_the_dtype_is_refused(dtype: str, value: float) -> None:
    with pytest.raises(OutOfRange, match="store as"):
        encode(np.array([1.0, value, np.inf, np.nan], dtype=np.float32), dtype)
    assert np.isinf(decode(encode(np.array([np.inf], dtype=np.float32), dtype), dtype)).all()


def test_names_and_unknown_dtypes() -> None:
    assert array_name("residual", "bfloat16") == "residual_bits"
    assert array_name("residual", "float16") == "residual"
    assert numpy_dtype("bfloat16") == np.uint16
    with pytest.raises(UsageError, match="float32, float16, bfloat16"):
        numpy_dtype("float8")
    with pytest.raises(UsageError, match="uint16"):
        decode(np.zeros(3, np.float32), "bfloat16")
