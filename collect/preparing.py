"""Everything a harvest settles before the first forward pass: numbers, splits, plan, memory and disk.

In: settings, a model's anatomy, a corpus and its tokens. Out: a frozen `Prepared`, or the first thing that
stands in the way, in one sentence. Cost: tokenising and near-duplicate search; no forward pass, nothing
written.
"""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int32

from ..store.errors import UsageError
from ..store.folder import committed_blocks
from .anatomy import Anatomy
from .block_rows import block_rows
from .buffers import Shape
from .corpora import Corpus
from .few_groups import Replan, few_groups_note
from .needs import Needs, check_needs, needs_of, working_device
from .planning import Planned, assign_splits, build_plan, reachable_tokens
from .settings import DEFAULT_BATCH_TOKENS, DEFAULT_SEQUENCE_LENGTH, HarvestSettings
from .site_names import DEFAULT_SITES
from .tokenise import TokenisedCorpus
from .windows import Cutting

GRAPH_SHARE = 4  # so many times smaller is a batch whose graph is kept for a backward pass
STORAGE_OF_COMPUTE = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float16"}


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A harvest ready to run."""

    anatomy: Anatomy
    corpus: Corpus
    tokens: TokenisedCorpus
    content_hashes: tuple[str, ...]
    groups: Int32[np.ndarray, " document"]
    splits: np.ndarray
    planned: Planned
    shape: Shape
    replan: Replan  # the same documents with other tokens and another share of the sequences
    n_sums: int = 0  # of a layer, where sums are stored instead of rows
    keep: Fraction | None = None  # share of the sequences

    @property
    def needs(self) -> Needs:
        """Memory, disk space and files."""
        return needs_of(self.anatomy, self.shape, self.planned.plan, self.n_sums)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is worth saying about the rows before they are collected."""
        few = few_groups_note(self.planned.plan, self.groups, self.splits, self.replan, self.keep)
        return tuple(note for note in (self.planned.note, few) if note)

    @property
    def store_bytes(self) -> int:
        """Bytes of all chunks, before any compressor."""
        return self.needs.store_bytes

    def missing_bytes(self, committed: Collection[int]) -> int:
        """Of those, the bytes that are not written yet."""
        n_blocks = self.planned.plan.n_blocks
        return self.store_bytes * len(set(range(n_blocks)) - set(committed)) // n_blocks


def prepare(
    anatomy: Anatomy,
    corpus: Corpus,
    tokens: TokenisedCorpus,
    settings: HarvestSettings,
    path: Path,
    *,
    measured: bool = False,
) -> Prepared:
    """Resolve, plan and check. `measured`: a batch was tried on the device, so no estimate has to do."""
    row = row_shape(anatomy, settings)
    cutting = cutting_of(anatomy, tokens, settings)
    hashes = tuple(document.content_hash for document in corpus.documents)
    groups = corpus.groups()
    splits = assign_splits(groups, hashes, seed=settings.seed)
    lengths = np.array([len(ids) for ids in tokens.ids], np.int64)
    # Sums are over the rows that a harvest of these settings would store: its block decides which they are.
    stored = dataclasses.replace(row, sites=DEFAULT_SITES) if settings.moments_only else row

    def planned_with(n_tokens: int, keep: Fraction | None) -> Planned:
        cut = dataclasses.replace(cutting, keep=keep)
        reachable = reachable_tokens(lengths, splits, cut, n_tokens, hashes)
        block = block_rows(reachable, stored.sizes, settings)
        places = tokens.bos_places
        return build_plan(
            lengths, splits, hashes, tokens=n_tokens, block=block, cutting=cut, bos_places=places
        )

    planned = planned_with(settings.tokens, settings.kept_share)
    shape = dataclasses.replace(row, block=planned.plan.block)
    prepared = Prepared(
        anatomy,
        corpus,
        tokens,
        hashes,
        groups,
        splits,
        planned,
        shape,
        lambda n_tokens, keep: planned_with(n_tokens, keep).plan,
        settings.n_sums,
        settings.kept_share,
    )
    missing_bytes = prepared.missing_bytes(committed_blocks(path))
    check_needs(prepared.needs, path, missing_bytes, measured=measured)
    return prepared


def row_shape(anatomy: Anatomy, settings: HarvestSettings) -> Shape:
    """A block buffer of one row."""
    layers = settings.resolve_layers(anatomy.n_layers)
    storage_dtype = settings.storage_dtype or STORAGE_OF_COMPUTE.get(anatomy.dtype, "float32")
    return Shape(tuple(layers), anatomy.d_model, 1, storage_dtype, settings.chosen_sites)


def cutting_of(anatomy: Anatomy, tokens: TokenisedCorpus, settings: HarvestSettings) -> Cutting:
    """Window and batch sizes, resolved for this model."""
    most = anatomy.max_positions
    length = settings.sequence_length or min(DEFAULT_SEQUENCE_LENGTH, most or DEFAULT_SEQUENCE_LENGTH)
    if most is not None and length > most:
        raise UsageError(
            f"sequence_length={length}: this model takes at most {most} positions. Use {most} or less."
        )
    default = DEFAULT_BATCH_TOKENS[working_device(anatomy).type]
    per_batch = settings.batch_tokens or max(
        length, default // GRAPH_SHARE if settings.differentiates else default
    )
    return Cutting(
        sequence_length=length,
        min_length=settings.min_length,
        batch_tokens=per_batch,
        seed=settings.seed,
        bos_id=tokens.bos_id,
        keep=settings.kept_share,
    )
