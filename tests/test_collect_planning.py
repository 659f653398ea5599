"""The plan keeps its promises for any corpus and any setting: Hypothesis looks for one that breaks them."""

import itertools
import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nearline.collect.planning import Planned, assign_splits, build_plan, reachable_tokens, seeded_order
from nearline.collect.rows import block_batches, block_columns
from nearline.collect.settings import parse
from nearline.collect.windows import Cutting, Supply, Window, batches
from nearline.store.errors import NearlineError, UsageError
from nearline.store.plan import PATTERN, SPLITS, Plan

N_DOCUMENTS = 40


def keys_of(n_documents: int) -> list[str]:
    return [f"{index:032x}" for index in range(n_documents)]


def even_splits(n_documents: int) -> np.ndarray:
    return np.array([SPLITS.index(PATTERN[index % len(PATTERN)]) for index in range(n_documents)], np.uint8)


@st.composite
def planned(draw: st.DrawFn) -> tuple[np.ndarray, Planned, int]:
    """Document lengths, the plan made of them, and the tokens asked for."""
    length = st.integers(0, 60)
    lengths = np.array(draw(st.lists(length, min_size=N_DOCUMENTS, max_size=N_DOCUMENTS)), np.int32)
    lengths += draw(st.integers(5, 20))
    sequence_length = draw(st.integers(2, 40))
    cutting = Cutting(
        sequence_length=sequence_length,
        min_length=draw(st.integers(1, min(sequence_length, 5))),
        batch_tokens=draw(st.integers(sequence_length, 4 * sequence_length)),
        seed=draw(st.integers(0, 5)),
        bos_id=draw(st.sampled_from([None, 0])),
    )
    splits = even_splits(N_DOCUMENTS)
    tokens = reachable_tokens(lengths, splits, cutting, draw(st.integers(20, 1000)))
    block = draw(st.integers(1, max(tokens // 4, 1)))
    try:
        return lengths, plan_of(lengths, tokens, block, cutting), tokens
    except UsageError:  # so short a corpus that cuts leave one split empty: refused, not planned
        return lengths, plan_of(lengths, 12, 1, cutting), 12


def plan_of(lengths: np.ndarray, tokens: int, block: int, cutting: Cutting) -> Planned:
    keys = keys_of(len(lengths))
    return build_plan(lengths, even_splits(len(lengths)), keys, tokens=tokens, block=block, cutting=cutting)


def ids_of(lengths: np.ndarray) -> list[np.ndarray]:
    """A different id for every token of the corpus, so that each row can be told from others; 0 is BOS."""
    ends = np.cumsum(lengths)
    return [
        np.arange(end - length, end, dtype=np.int32) + 1 for length, end in zip(lengths, ends, strict=True)
    ]


def columns_of(plan: Plan, lengths: np.ndarray) -> dict[str, np.ndarray]:
    blocks = [block_columns(plan, block, ids_of(lengths), [0]) for block in range(plan.n_blocks)]
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


@given(planned())
def test_blocks_are_full_and_of_one_split(case: tuple[np.ndarray, Planned, int]) -> None:
    lengths, result, tokens = case
    plan = result.plan
    plan.validate()
    assert (plan.block_rows[:-1] == plan.block).all()
    assert 1 <= plan.block_rows[-1] <= plan.block
    assert plan.n_tokens == plan.block_rows.sum() == plan.length.sum() <= tokens
    assert (result.note is None) == (plan.n_tokens == tokens)
    assert (even_splits(len(lengths))[plan.document] == plan.block_split[plan.sequence_block]).all()
    wanted = itertools.islice(itertools.cycle(PATTERN), plan.n_blocks)
    assert [SPLITS[split] for split in plan.block_split] == list(wanted)
    assert set(plan.block_split[:3].tolist()) == {0, 1, 2}


@given(planned())
def test_rows_are_tokens_of_documents_in_order_each_once(
    case: tuple[np.ndarray, Planned, int],
) -> None:
    lengths, result, _ = case
    plan, columns = result.plan, columns_of(result.plan, case[0])
    assert len(columns["token_id"]) == plan.n_tokens
    ids = ids_of(lengths)
    stored = columns["token_id"][~columns["special"]]
    assert len(np.unique(stored)) == len(stored)
    for sequence, row0 in enumerate(plan.row_offsets[:-1]):
        rows = slice(int(row0), int(row0) + int(plan.length[sequence]))
        document = ids[plan.document[sequence]]
        assert (columns["position"][rows] == np.arange(plan.length[sequence])).all()
        assert (columns["sequence"][rows] == sequence).all()
        assert (columns["document"][rows] == plan.document[sequence]).all()
        tokens, targets = columns["token_id"][rows], columns["target_id"][rows]
        if plan.bos[sequence]:
            assert tokens[0] == plan.bos_id
            assert targets[0] == document[plan.start[sequence]]
            tokens, targets = tokens[1:], targets[1:]
        start, stop = plan.start[sequence], plan.start[sequence] + len(tokens)
        assert (tokens == document[start:stop]).all()
        assert (targets == np.append(document, -1)[start + 1 : stop + 1]).all()


@given(planned())
def test_every_token_is_stored_or_counted_as_dropped(case: tuple[np.ndarray, Planned, int]) -> None:
    lengths, result, _ = case
    plan = result.plan
    bos_rows = np.bincount(plan.document, weights=plan.bos, minlength=len(lengths))
    assert (result.rows - bos_rows + result.dropped == lengths).all()
    assert result.rows.sum() == plan.n_tokens
    assert (result.dropped >= 0).all()


@given(planned())
def test_batches_stay_in_their_block_and_within_their_size(case: tuple[np.ndarray, Planned, int]) -> None:
    lengths, result, _ = case
    plan = result.plan
    ids = ids_of(lengths)
    for block in range(plan.n_blocks):
        token_id = block_columns(plan, block, ids, [])["token_id"]
        row = 0
        for batch in block_batches(plan, block, token_id):
            assert (batch.row0, batch.row1 - batch.row0) == (row, batch.mask.sum())
            assert batch.ids.size <= plan.batch_tokens
            assert (batch.ids[batch.mask] == token_id[batch.row0 : batch.row1]).all()
            assert (np.diff(batch.mask.astype(int), axis=1) <= 0).all(), "padding stands on the right only"
            row = batch.row1
        assert row == plan.block_rows[block]


@given(planned())
def test_only_the_first_half_of_a_cut_may_be_short(case: tuple[np.ndarray, Planned, int]) -> None:
    plan = case[1].plan
    short = np.flatnonzero(plan.length < plan.min_length)
    assert np.unique(plan.sequence_block[short]).size == short.size, (
        "at most one per block: the one that fills it"
    )


def test_same_seed_same_plan_other_seed_other_plan() -> None:
    lengths = np.full(N_DOCUMENTS, 50, np.int32)
    plans = [
        plan_of(
            lengths, 500, 40, Cutting(sequence_length=32, min_length=4, batch_tokens=64, seed=seed, bos_id=0)
        ).plan
        for seed in (1, 1, 2)
    ]
    assert plans[0].to_json_bytes() == plans[1].to_json_bytes()
    assert plans[0].digest != plans[2].digest
    assert Plan.parse(json.loads(plans[0].to_json_bytes())) == plans[0]


def test_order_follows_content_not_place() -> None:
    keys = keys_of(30)
    forward = [keys[index] for index in seeded_order(keys, 3)]
    backward = [keys[::-1][index] for index in seeded_order(keys[::-1], 3)]
    assert forward == backward != keys


@given(st.lists(st.integers(0, 60), min_size=100, max_size=100), st.integers(0, 3))
def test_groups_never_stand_on_two_sides(grouped: list[int], seed: int) -> None:
    groups = [*grouped, *range(100, 200)]  # and a hundred documents of their own, so that no split is empty
    split = assign_splits(np.array(groups), keys_of(200), seed=seed)
    for group in set(groups):
        assert len({int(split[index]) for index in range(200) if groups[index] == group}) == 1


def test_the_split_of_a_document_does_not_depend_on_the_rest_of_the_corpus() -> None:
    keys = keys_of(300)
    whole = assign_splits(np.arange(300), keys)
    part = assign_splits(np.arange(100), keys[100:200])
    assert (whole[100:200] == part).all()


def test_split_shares_are_near_their_fractions() -> None:
    shares = np.bincount(assign_splits(np.arange(5000), keys_of(5000))) / 5000
    # Four standard deviations of a share of 0.4 over 5,000 independent hashes.
    np.testing.assert_allclose(shares, (0.4, 0.2, 0.4), atol=0.028)


def test_too_few_groups_is_one_clear_sentence() -> None:
    with pytest.raises(
        UsageError, match=r"too few documents: 50 documents in 1 groups .* leave the .* split"
    ):
        assign_splits(np.zeros(50, np.int32), keys_of(50))


def test_too_few_tokens_for_three_splits_says_what_to_do() -> None:
    cutting = Cutting(sequence_length=32, min_length=4, batch_tokens=64, seed=0, bos_id=None)
    with pytest.raises(UsageError, match=r"blocks of 60 leave no block for gate; .* set block to 33 or less"):
        plan_of(np.full(N_DOCUMENTS, 50, np.int32), 100, 60, cutting)
    with pytest.raises(UsageError, match="too few tokens: the fit split ran out after 0 rows"):
        plan_of(np.full(N_DOCUMENTS, 3, np.int32), 100, 10, cutting)


def test_a_shorter_corpus_lowers_the_tokens_and_says_so() -> None:
    cutting = Cutting(sequence_length=32, min_length=4, batch_tokens=64, seed=0, bos_id=None)
    lengths = np.full(N_DOCUMENTS, 32, np.int32)
    reachable = reachable_tokens(lengths, even_splits(N_DOCUMENTS), cutting, 100_000)
    assert reachable == N_DOCUMENTS * 32
    result = plan_of(lengths, 100_000, 64, cutting)
    assert result.plan.n_tokens == reachable
    assert result.note is not None
    assert "tokens lowered from 100,000" in result.note


def test_impossible_cuttings_are_refused() -> None:
    with pytest.raises(UsageError, match="min_length=40 is above sequence_length=32"):
        Cutting(sequence_length=32, min_length=40, batch_tokens=64, seed=0, bos_id=None)
    with pytest.raises(UsageError, match="batch_tokens=16 is below sequence_length=32"):
        Cutting(sequence_length=32, min_length=4, batch_tokens=16, seed=0, bos_id=None)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(50, 200))
def test_batches_hold_each_sequence_once_longest_first(rows: list[int], batch_tokens: int) -> None:
    chosen = list(batches(rows, batch_tokens))
    flat = [index for batch in chosen for index in batch]
    assert sorted(flat) == list(range(len(rows)))
    assert [rows[index] for index in flat] == sorted(rows, reverse=True)


# ---- a share of the windows


def keeping(share: Fraction | None, *, seed: int = 0, bos_id: int | None = None) -> Cutting:
    return Cutting(sequence_length=32, min_length=4, batch_tokens=64, seed=seed, bos_id=bos_id, keep=share)


def windows_of(lengths: np.ndarray, keys: list[str], cutting: Cutting) -> list[Window]:
    return Supply(np.arange(len(lengths)), lengths, cutting, keys).take(10**9)


def test_keep_keeps_about_its_share_and_less_of_it_is_part_of_more() -> None:
    lengths, keys = np.random.default_rng(0).integers(1, 400, 2000), keys_of(2000)
    whole = windows_of(lengths, keys, keeping(None))
    kept = {part: set(windows_of(lengths, keys, keeping(Fraction(1, part)))) for part in (2, 4, 8)}
    assert kept[8] < kept[4] < kept[2] < set(whole)
    for part, windows in kept.items():
        # Four standard deviations of a binomial count.
        bound = 4 * (len(whole) * (part - 1)) ** 0.5 / part
        assert abs(len(windows) - len(whole) / part) < bound
    assert kept[8] != set(windows_of(lengths, keys, keeping(Fraction(1, 8), seed=1)))


def test_what_is_kept_of_a_document_does_not_depend_on_the_others() -> None:
    lengths, keys, cutting = np.arange(300, 340), keys_of(40), keeping(Fraction(1, 3))
    alone = [
        (keys[number], window.start, window.rows)
        for number in range(40)
        for window in windows_of(lengths[number : number + 1], keys[number : number + 1], cutting)
    ]
    backward = windows_of(lengths[::-1], keys[::-1], cutting)
    assert {(keys[::-1][one.document], one.start, one.rows) for one in backward} == set(alone)
    assert {one.start for one in backward} > {0, 32}


@given(st.integers(0, 20), st.sampled_from([None, 0]), st.sampled_from(["1/2", "0.7", "1/5"]))
def test_reachable_and_dropped_tokens_count_what_is_left_out(
    seed: int, bos_id: int | None, keep: str
) -> None:
    lengths = np.random.default_rng(seed).integers(1, 300, 200)
    keys, splits = keys_of(200), even_splits(200)
    cutting = keeping(parse({"keep": keep}).kept_share, seed=seed, bos_id=bos_id)
    supply = np.zeros(3)
    for window in windows_of(lengths, keys, cutting):
        supply[splits[window.document]] += window.rows
    reachable = reachable_tokens(lengths, splits, cutting, 10**9, keys)
    assert reachable == int((supply / [0.4, 0.2, 0.4]).min())
    found = build_plan(lengths, splits, keys, tokens=reachable, block=100, cutting=cutting)
    assert reachable - 300 < found.plan.n_tokens <= reachable, "each split loses a block or a cut at most"
    stored = np.bincount(found.plan.document, weights=found.plan.length - found.plan.bos, minlength=200)
    assert (stored + found.dropped == lengths).all()
    assert {(one.document, one.start) for one in windows_of(lengths, keys, cutting)} >= {
        (int(document), int(start))
        for document, start in zip(found.plan.document, found.plan.start, strict=True)
        if start % cutting.payload == 0
    }
    more = build_plan(lengths, splits, keys, tokens=10**6, block=100, cutting=cutting)
    assert f"keep={cutting.keep} leaves out the other windows" in (more.note or "")


@pytest.mark.parametrize(
    ("given_value", "kept"),
    [
        ("1/8", "1/8"),
        ("0.125", "1/8"),
        (0.125, "1/8"),
        (" 2/16 ", "1/8"),
        (1, None),
        ("1.0", None),
        (None, None),
    ],
)
def test_one_share_has_one_spelling(given_value: object, kept: str | None) -> None:
    assert parse({"keep": given_value}).keep == kept


@pytest.mark.parametrize("wrong", ["0", "-1/8", "9/8", 2, "1/0", "an eighth", "", "nan", True])
def test_what_is_no_share_is_refused(wrong: object) -> None:
    with pytest.raises(UsageError, match="keep"):
        parse({"keep": wrong})


# ---- BOS in documents


@given(st.integers(0, 1000), st.sampled_from([0, 1]), st.integers(1, 5), st.integers(3, 60))
def test_no_window_opens_on_a_bos_of_the_document(seed: int, bos: int, min_length: int, block: int) -> None:
    random = np.random.default_rng(seed)
    ids = [np.where(random.random(n) < 0.5, 0, np.arange(n) + 1) for n in random.integers(20, 50, 60)]
    lengths, cutting = (
        np.array([len(row) for row in ids]),
        Cutting(12, min_length, 24, seed, 0 if bos else None),
    )
    places = {number: set(np.flatnonzero(row == 0).tolist()) for number, row in enumerate(ids)}
    found = build_plan(
        lengths, even_splits(60), keys_of(60), tokens=600, block=block, cutting=cutting, bos_places=places
    )
    found.plan.validate()
    rows = [np.asarray(row, np.int32) for row in ids]
    for number in range(found.plan.n_blocks):
        columns = block_columns(found.plan, number, rows, [0])  # refuses two BOS itself
        second = columns["token_id"][columns["position"] == 1]
        assert not bos or (second != 0).all()
    stored = np.bincount(found.plan.document, weights=found.plan.length - found.plan.bos, minlength=60)
    assert (stored + found.dropped == lengths).all()


def test_two_bos_at_the_head_of_a_sequence_are_refused_at_last() -> None:
    lengths = np.full(N_DOCUMENTS, 50)
    plan = plan_of(lengths, 300, 30, Cutting(32, 4, 64, 0, bos_id=1)).plan
    with pytest.raises(NearlineError, match="sequence 0 of the plan would open with two BOS tokens"):
        block_columns(plan, 0, [np.ones(50, np.int32)] * N_DOCUMENTS, [1])
