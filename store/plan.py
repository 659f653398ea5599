"""The resolved plan of a harvest: which rows stand where, fixed before the first forward pass.

In: the scalars and columns that planning computed, or plan.json. Out: a checked, frozen Plan whose
canonical JSON has a digest (BLAKE3). One column entry per sequence, in row order: sequences follow each
other without a gap, a block is a run of whole sequences of one split, a batch a run of sequences inside one
block. Cost: O(sequences).
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from blake3 import blake3
from jaxtyping import Bool, Int, Int32, UInt8

from .errors import FormatError
from .parsing import (
    INT32_MAX,
    canonical,
    get_int,
    get_ints,
    get_list,
    get_object,
    get_optional_int,
)

SPLITS = ("fit", "gate", "test")
PATTERN = ("fit", "test", "gate", "fit", "test")
MAX_BLOCKS = 9_999  # one folder entry per block and layer; the Hub takes at most 10,000 entries a folder

_SCALARS = ("n_tokens", "block", "sequence_length", "min_length", "batch_tokens", "seed")
_SEQUENCE_COLUMNS = ("document", "start", "length", "sequence_batch", "sequence_block")
_KEYS = (
    "schema",
    *_SCALARS,
    "bos_id",
    "pattern",
    "fractions",
    *_SEQUENCE_COLUMNS,
    "bos",
    "block_split",
    "block_rows",
)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Rows, sequences, batches and blocks of a store; `validate()` is called by `parse` and by the writer."""

    n_tokens: int
    block: int  # rows of every block but possibly the last
    sequence_length: int
    min_length: int
    batch_tokens: int
    seed: int
    bos_id: int | None  # None: no BOS is put in front of a sequence
    document: Int32[np.ndarray, " sequence"]
    start: Int32[np.ndarray, " sequence"]  # first token of the document in this sequence, BOS not counted
    length: Int32[np.ndarray, " sequence"]  # rows, BOS counted
    bos: Bool[np.ndarray, " sequence"]  # row 0 of the sequence is the BOS
    sequence_batch: Int32[np.ndarray, " sequence"]  # numbered from 0 over the whole plan
    sequence_block: Int32[np.ndarray, " sequence"]
    block_split: UInt8[np.ndarray, " block"]  # index into SPLITS
    block_rows: Int32[np.ndarray, " block"]
    pattern: tuple[str, ...] = PATTERN
    fractions: tuple[float, ...] = (0.4, 0.2, 0.4)  # of fit, gate, test
    _digest: list[str] = field(default_factory=list[str], init=False, repr=False)  # once it was asked for

    @property
    def n_blocks(self) -> int:
        return len(self.block_rows)

    @property
    def n_sequences(self) -> int:
        return len(self.length)

    @property
    def row_offsets(self) -> Int[np.ndarray, " sequence_or_end"]:
        """First row of each sequence, and N at the end."""
        return np.concatenate(([0], np.cumsum(self.length, dtype=np.int64)))

    def block_range(self, block: int) -> tuple[int, int]:
        """Rows [row0, row1) of a block."""
        if not 0 <= block < self.n_blocks:
            raise IndexError(f"block {block}: this plan has blocks 0-{self.n_blocks - 1}")
        row0 = block * self.block
        return row0, row0 + int(self.block_rows[block])

    def sequences_of(self, block: int) -> range:
        """Indices of the sequences of a block, in row order."""
        low, high = np.searchsorted(self.sequence_block, [block, block + 1])
        return range(int(low), int(high))

    def batches_of(self, block: int) -> list[range]:
        """Sequence indices of each batch of a block, in row order."""
        sequences = self.sequences_of(block)
        batch = self.sequence_batch[sequences.start : sequences.stop]
        cuts: list[int] = [0, *(np.flatnonzero(np.diff(batch)) + 1).tolist(), len(batch)]
        return [range(sequences.start + low, sequences.start + high) for low, high in pairwise(cuts)]

    def split_of(self, block: int) -> str:
        return SPLITS[int(self.block_split[block])]

    def to_json_bytes(self) -> bytes:
        """Canonical JSON; equal plans give equal bytes."""
        data: dict[str, Any] = {"schema": 1, "bos_id": self.bos_id, "pattern": list(self.pattern)}
        data |= {key: int(getattr(self, key)) for key in _SCALARS}
        data |= {"fractions": [float(share) for share in self.fractions]}
        data |= {
            key: getattr(self, key).tolist() for key in (*_SEQUENCE_COLUMNS, "block_split", "block_rows")
        }
        return canonical(data | {"bos": self.bos.astype(int).tolist()})

    @property
    def digest(self) -> str:
        """BLAKE3 of the canonical JSON, in hex; computed once, for every block record is compared with it."""
        if not self._digest:
            self._digest.append(blake3(self.to_json_bytes()).hexdigest())
        return self._digest[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.to_json_bytes() == other.to_json_bytes()

    def __hash__(self) -> int:
        return hash(self.digest)

    def validate(self, where: str = "plan") -> None:
        """Check every promise of the class docstring; FormatError names the first one that is broken."""
        _check_scalars(self, where)
        _check_sequences(self, where)
        _check_blocks(self, where)
        _check_batches(self, where)

    @classmethod
    def parse(cls, data: object, where: str = "plan.json") -> "Plan":
        """A checked Plan from untrusted JSON."""
        found = get_object(data, where, keys=_KEYS)
        get_int(found, "schema", where, 1, 1)
        scalars: dict[str, Any] = {key: get_int(found, key, where) for key in _SCALARS}
        columns: dict[str, Any] = {
            key: _column(found, key, where)
            for key in (*_SEQUENCE_COLUMNS, "bos", "block_split", "block_rows")
        }
        if len(columns["block_rows"]) > MAX_BLOCKS:
            n_blocks = len(columns["block_rows"])
            raise FormatError(
                f"{where}: `block_rows` has {n_blocks} entries, at most {MAX_BLOCKS} are allowed"
            )
        if columns["bos"].size and not np.isin(columns["bos"], (0, 1)).all():
            raise FormatError(f"{where}: `bos` holds something other than 0 and 1")
        if columns["block_split"].size and columns["block_split"].max() >= len(SPLITS):
            raise FormatError(f"{where}: `block_split` holds something other than 0 fit, 1 gate, 2 test")
        plan = cls(
            **scalars,
            bos_id=get_optional_int(found, "bos_id", where, 0, INT32_MAX),
            pattern=tuple(get_list(found, "pattern", where, str, most=64)),
            fractions=_fractions(found, where),
            **{key: columns[key] for key in (*_SEQUENCE_COLUMNS, "block_rows")},
            bos=columns["bos"].astype(bool),
            block_split=columns["block_split"].astype(np.uint8),
        )
        plan.validate(where)
        return plan


def _column(data: dict[str, Any], key: str, where: str) -> Int32[np.ndarray, " entry"]:
    return np.array(get_ints(data, key, where, high=INT32_MAX), dtype=np.int32)


def _fractions(data: dict[str, Any], where: str) -> tuple[float, ...]:
    shares = get_list(data, "fractions", where, (int, float), most=len(SPLITS))
    _require(all(0 <= share <= 1 for share in shares), where, "`fractions` must lie in 0..1")
    return tuple(map(float, shares))


def _require(good: bool | np.bool_, where: str, message: str) -> None:
    if not good:
        raise FormatError(f"{where}: {message}")


def _check_scalars(plan: Plan, where: str) -> None:
    for key in ("n_tokens", "block", "sequence_length"):
        _require(getattr(plan, key) >= 1, where, f"`{key}` is {getattr(plan, key)}, at least 1 is needed")
    for key in ("min_length", "batch_tokens", "seed"):
        _require(getattr(plan, key) >= 0, where, f"`{key}` is {getattr(plan, key)}, it must not be negative")
    for key in ("block", "sequence_length"):  # numbers of rows are int32 columns
        most = f"`{key}` is {getattr(plan, key)}, at most {INT32_MAX} is allowed"
        _require(getattr(plan, key) <= INT32_MAX, where, most)
    unknown = sorted(set(plan.pattern) - set(SPLITS))
    _require(
        len(plan.pattern) > 0 and not unknown,
        where,
        f"`pattern` must name {', '.join(SPLITS)}, in turns",
    )
    good = len(plan.fractions) == len(SPLITS) and all(0 <= share <= 1 for share in plan.fractions)
    _require(
        good and abs(sum(plan.fractions) - 1) < 1e-9, where, f"`fractions` {plan.fractions} must sum to 1"
    )


def _check_sequences(plan: Plan, where: str) -> None:
    expected = {key: np.dtype(np.int32) for key in _SEQUENCE_COLUMNS} | {"bos": np.dtype(bool)}
    for key, dtype in expected.items():
        column = getattr(plan, key)
        good = column.shape == (plan.n_sequences,) and column.dtype == dtype
        _require(good, where, f"`{key}` is {column.dtype} {column.shape}, not {dtype} ({plan.n_sequences},)")
    _require(plan.n_sequences > 0, where, "there is no sequence")
    _require(plan.length.min() >= 1, where, "a sequence has no row")
    longest = int(plan.length.max())
    _require(
        longest <= plan.sequence_length,
        where,
        f"a sequence has {longest} rows, the most is {plan.sequence_length}",
    )
    _require(min(plan.start.min(), plan.document.min()) >= 0, where, "a start or document is negative")
    _require(not (plan.bos.any() and plan.bos_id is None), where, "`bos` is set but `bos_id` is null")
    total = int(plan.length.sum(dtype=np.int64))
    _require(total == plan.n_tokens, where, f"sequences hold {total} rows, `n_tokens` is {plan.n_tokens}")


def _check_blocks(plan: Plan, where: str) -> None:
    rows, split = plan.block_rows, plan.block_split
    _require(
        rows.dtype == np.int32 and split.dtype == np.uint8,
        where,
        "`block_rows` is int32, `block_split` uint8",
    )
    _require(
        rows.ndim == 1 and rows.shape == split.shape, where, "`block_rows` and `block_split` differ in length"
    )
    _require(split.size > 0 and split.max() < len(SPLITS), where, "`block_split` must hold 0, 1 and 2 only")
    _require(
        (rows[:-1] == plan.block).all(), where, f"a block before the last has other than {plan.block} rows"
    )
    _require(
        1 <= rows[-1] <= plan.block, where, f"the last block has {rows[-1]} rows, 1..{plan.block} are allowed"
    )
    steps = np.diff(plan.sequence_block, prepend=-1)
    good = ((steps == 0) | (steps == 1)).all() and plan.sequence_block[-1] == len(rows) - 1
    _require(good, where, "`sequence_block` does not count the blocks upward, each with a sequence")
    held = np.bincount(plan.sequence_block, weights=plan.length, minlength=len(rows))
    wrong = np.flatnonzero(held != rows)
    _require(
        not wrong.size,
        where,
        f"block {wrong[:1].tolist()} holds other rows than its sequences sum to",
    )


def _check_batches(plan: Plan, where: str) -> None:
    steps = np.diff(plan.sequence_batch, prepend=-1)
    _require(
        ((steps == 0) | (steps == 1)).all(),
        where,
        "`sequence_batch` does not count the batches from 0 upward",
    )
    new_block = np.diff(plan.sequence_block, prepend=-1) == 1
    _require((steps[new_block] == 1).all(), where, "a batch crosses a block")
