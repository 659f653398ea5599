"""Plan: what it derives from its columns is what counting by hand gives."""

import numpy as np
import pytest
from helpers_store import synthetic
from nearline.store import SPLITS


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_blocks_sequences_and_batches_tile_the_rows(seed: int) -> None:
    plan = synthetic(n_tokens=1234, block=100, seed=seed).plan
    row = sequence = 0
    for block in range(plan.n_blocks):
        row0, row1 = plan.block_range(block)
        assert row0 == row
        assert row1 - row0 == (100 if block < 12 else 34)
        batches = plan.batches_of(block)
        members = [index for batch in batches for index in batch]
        assert members == list(plan.sequences_of(block)) == list(range(sequence, sequence + len(members)))
        assert [int(plan.sequence_batch[batch.start]) for batch in batches] == list(
            range(plan.sequence_batch[members[0]], plan.sequence_batch[members[-1]] + 1)
        )
        assert plan.length[members].sum() == row1 - row0
        assert plan.split_of(block) == SPLITS[plan.block_split[block]]
        row, sequence = row1, sequence + len(members)
    assert row == plan.n_tokens
    assert np.array_equal(plan.row_offsets, [sum(plan.length[:i]) for i in range(plan.n_sequences + 1)])


def test_a_block_that_does_not_exist_is_an_error() -> None:
    plan = synthetic(n_tokens=500, block=160).plan
    with pytest.raises(IndexError, match="blocks 0-3"):
        plan.block_range(4)


def test_the_digest_moves_with_every_column() -> None:
    plans = [synthetic(n_tokens=500, block=160, seed=seed).plan for seed in (0, 0, 1)]
    assert plans[0].digest == plans[1].digest
    assert plans[0] == plans[1]
    assert hash(plans[0]) == hash(plans[1])
    assert plans[0].digest != plans[2].digest
    assert plans[0] != plans[2]
