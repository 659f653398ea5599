"""Storage dtypes: float32, float16, and bfloat16 kept as its uint16 bits.

In: float32 values, or the array as stored. Out: the other one. bfloat16 has no numpy dtype, so an array
that holds bits is called `<site>_bits`: nobody averages bit patterns by accident. Cost: one pass over the
values.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Shaped

from .errors import OutOfRange, UsageError

STORAGE_DTYPES = ("float32", "float16", "bfloat16")
SITES = ("embedding", "residual", "mlp_output", "mlp_input", "mlp_output_grad")
LAYER_SITES = tuple(site for site in SITES if site != "embedding")
GRADIENT = "mlp_output_grad"  # stored times a power of two, one for each layer
MOST_EXPONENT = 126  # of such a power: it and its inverse are ordinary float32 numbers

_NUMPY_DTYPES = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2")}
_FILL: dict[str, Any] = {
    "float32": np.float32("nan"),
    "float16": np.float16("nan"),
    "bfloat16": np.uint16(0x7FC1),
}
_PIECE = 2**17  # values: 512 KiB of float32, which stay in a core's cache over the passes
_SIGN_AND_MAGNITUDE = np.int32(-0x70002000)  # 0x8FFFE000: the sign bit, and where exponent and fraction stand
_SMALLEST = np.array([1 << 13], dtype=np.int32)  # float16's smallest subnormal, before the shift
_EXPONENT_SHIFT = np.float32(2.0**112)  # the biases of the exponents, 127 and 15, differ by 112
LARGEST = {"float32": 3.4028234663852886e38, "float16": 65504.0, "bfloat16": 3.3895313892515355e38}


def numpy_dtype(storage_dtype: str) -> np.dtype[Any]:
    """The numpy dtype of the stored array: `bfloat16` is uint16."""
    if storage_dtype not in _NUMPY_DTYPES:
        raise UsageError(f"storage dtype {storage_dtype!r} is unknown; allowed: {', '.join(STORAGE_DTYPES)}")
    return _NUMPY_DTYPES[storage_dtype]


def fill_value(storage_dtype: str) -> Any:
    """What an unwritten value reads as: NaN, or for bits a NaN pattern that no model emits."""
    numpy_dtype(storage_dtype)
    return _FILL[storage_dtype]


def array_name(site: str, storage_dtype: str) -> str:
    """Name of the array that holds a site: `residual`, or `residual_bits` under bfloat16."""
    numpy_dtype(storage_dtype)
    return f"{site}_bits" if storage_dtype == "bfloat16" else site


def encode(values: Float[np.ndarray, "..."], storage_dtype: str) -> Shaped[np.ndarray, "..."]:
    """The stored form of float32 values, rounded to nearest even; NaN and infinities stay what they are.

    Raises OutOfRange when a finite value has no finite counterpart: a cast would write `inf` in silence.
    """
    dtype = numpy_dtype(storage_dtype)
    values = np.asarray(values, dtype=np.float32)
    if storage_dtype == "float32":
        return np.array(values, dtype=dtype, order="C")
    if storage_dtype == "float16":
        try:
            with np.errstate(over="raise"):
                return np.array(values, dtype=dtype, order="C")
        except FloatingPointError:
            raise _out_of_range(values, storage_dtype) from None
    return _to_bfloat16(values)


def decode(stored: Shaped[np.ndarray, "*shape"], storage_dtype: str) -> Float[np.ndarray, "*shape"]:
    """float32 values of a stored array; exact, payload bits of NaN included under bfloat16."""
    out = np.empty(stored.shape, dtype=np.float32)
    decode_into(stored, storage_dtype, out)
    return out


def decode_into(
    stored: Shaped[np.ndarray, "*shape"], storage_dtype: str, out: Float[np.ndarray, "*shape"]
) -> None:
    """As `decode`, into a float32 array of the caller's."""
    if stored.dtype != numpy_dtype(storage_dtype):
        raise UsageError(f"{storage_dtype} is stored as {numpy_dtype(storage_dtype)}, not as {stored.dtype}")
    if storage_dtype == "bfloat16":
        bits = out.view(np.uint32)
        np.copyto(bits, stored)  # widen, then shift in place: faster than one casting ufunc
        np.left_shift(bits, 16, out=bits)
    elif storage_dtype == "float16" and stored.flags.c_contiguous and out.flags.c_contiguous:
        _from_float16(stored.reshape(-1), out.reshape(-1))
    else:
        np.copyto(out, stored)


def _from_float16(stored: Shaped[np.ndarray, " value"], out: Float32[np.ndarray, " value"]) -> None:
    """The cast of numpy, bit for bit, at four times its speed (5 against 1.1 GiB/s), by integer operations.

    The exponent is moved into place as bits and corrected by one exact multiplication, which gets subnormals
    right too. Only infinities and NaN come out wrong, as finite values of 65536 and more: such pieces
    are cast by numpy. So is everything where a library has told the processor to flush subnormals to zero.
    """
    if _SMALLEST.view(np.float32)[0] * _EXPONENT_SHIFT != np.float32(2.0**-24):
        np.copyto(out, stored)
        return
    for start in range(0, stored.size, _PIECE):
        source, target = stored[start : start + _PIECE], out[start : start + _PIECE]
        bits = target.view(np.int32)
        np.copyto(bits, source.view(np.int16))  # the sign spreads over the upper half
        np.left_shift(bits, 13, out=bits)
        np.bitwise_and(bits, _SIGN_AND_MAGNITUDE, out=bits)
        np.multiply(target, _EXPONENT_SHIFT, out=target)
        if target.max() >= 65536 or target.min() <= -65536:
            np.copyto(target, source)


def _to_bfloat16(values: Float[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
    bits = np.ascontiguousarray(values).reshape(values.shape).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype("<u2")
    nan = np.isnan(values)
    if nan.any():  # rounding may carry a NaN's payload into infinity: keep the top bits, set the quiet bit
        rounded[nan] = (bits[nan] >> 16).astype("<u2") | np.uint16(0x0040)
    overflow = ((rounded & 0x7FFF) == 0x7F80) & np.isfinite(values)
    if overflow.any():
        raise _out_of_range(values, "bfloat16")
    return rounded


def _out_of_range(values: Float[np.ndarray, "..."], storage_dtype: str) -> OutOfRange:
    finite = np.abs(values[np.isfinite(values)])
    wider = "bfloat16 or float32" if storage_dtype == "float16" else "float32"
    return OutOfRange(
        f"|value| {finite.max():.6g} is beyond {storage_dtype}, which ends at {LARGEST[storage_dtype]:.6g}; "
        f"store as {wider}"
    )
