"""How many padded tokens a GPU takes at once, found by trying before the plan is fixed, and never after.

In: a model on its device, settings, and the folder of a store that may be begun. Out: the settings with
`batch_tokens` decided, or the one sentence that says what to do. A store that was begun keeps its number
whatever is free today, so that the same command continues to the same bytes. Cost: two forward passes, or
a few more where memory is short; on a CPU none.
"""

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..store.beginning import begun_attributes
from ..store.errors import EnvironmentFault
from ..store.plan import Plan
from .anatomy import Anatomy
from .buffers import BlockBuffer, Shape
from .capture import Capture
from .flight import OpenBlock, forward
from .needs import working_device
from .preparing import cutting_of, row_shape
from .ranks import ranks_of
from .recorder import Filling, Recorder
from .rows import Batch
from .settings import HarvestSettings
from .stopping import CONTINUES
from .tokenise import TokenisedCorpus

FULL = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")


@dataclass(frozen=True, slots=True)
class Budget:
    """Settings with `batch_tokens`; `measured`: a batch of that size was tried; `note`: what to tell."""

    settings: HarvestSettings
    measured: bool = False
    note: str | None = None


def batch_budget(
    anatomy: Anatomy,
    tokens: TokenisedCorpus,
    settings: HarvestSettings,
    folder: Path,
    *,
    probe: bool | None = None,
) -> Budget:
    """The number that `settings` leave open. `probe`: whether to try; default: not on a CPU."""
    if probe is None:
        probe = working_device(anatomy).type != "cpu"
    if not probe or settings.batch_tokens is not None:
        return Budget(settings)
    shape, cutting = row_shape(anatomy, settings), cutting_of(anatomy, tokens, settings)
    begun, length = begun_attributes(folder), cutting.sequence_length
    wanted = fitting = cutting.batch_tokens if begun is None else begun.plan.batch_tokens
    while not fits(anatomy, tokens, shape, fitting, length):
        if begun is not None:
            raise EnvironmentFault(
                f"{folder} was begun with batch_tokens={wanted:,}, for which this device has too little "
                "memory now. Free memory on it (other programs use it too), or collect into another folder."
            )
        if fitting <= length:
            raise EnvironmentFault(
                f"this device has too little memory for one window of {length:,} tokens beside the model. "
                "Set a lower sequence_length, free memory on it, or take a larger one."
            )
        fitting = max(fitting // 2, length)
    found = settings.model_copy(update={"batch_tokens": fitting})
    if fitting == wanted:
        return Budget(found, measured=True)
    little = f"batches of {wanted:,} tokens do not fit this device beside the model"
    if (world_size := ranks_of(settings).world_size) > 1:
        raise EnvironmentFault(
            f"{little}, {fitting:,} do. All {world_size} ranks need the same number: give each "
            f"batch_tokens={fitting}."
        )
    return Budget(found, measured=True, note=f"{little}; batch_tokens={fitting:,} is used")


def fits(anatomy: Anatomy, tokens: TokenisedCorpus, shape: Shape, batch_tokens: int, length: int) -> bool:
    """Whether two forward passes of so many tokens go through, one behind the other as in a harvest."""
    try:
        _try(anatomy, _batch(tokens, batch_tokens, length, anatomy.vocab_size), shape)
        return True
    except RuntimeError as error:
        if not is_full(error):
            raise
    # What the error held on to is let go by now.
    if (device := working_device(anatomy)).type != "cpu":
        gc.collect()
        torch.get_device_module(device).empty_cache()
    return False


def _try(anatomy: Anatomy, batch: Batch, shape: Shape) -> None:
    n_rows = batch.row1
    buffer = BlockBuffer(
        Shape(shape.layers, shape.d_model, n_rows, shape.storage_dtype, shape.sites),
        pinned=working_device(anatomy).type == "cuda",
        thin=True,
    )
    token_id = batch.ids[batch.mask].astype(np.int32)
    columns = {"token_id": token_id, "target_id": np.roll(token_id, -1)}
    block = OpenBlock(0, 0.0, columns, Filling(buffer, shape))
    recorder = Recorder(shape, most_rows=n_rows, mask_nonfinite=True, ahead=1)
    with Capture(anatomy, recorder, sites=shape.sites, layers=shape.layers) as capture:
        launched = [forward(anatomy, recorder, capture, block, batch) for _ in range(2)]
        for one in launched:
            recorder.wait(one)


def _batch(tokens: TokenisedCorpus, batch_tokens: int, length: int, vocab_size: int) -> Batch:
    """Real ids, as some models take more memory for one token than for another; padded by one place, so
    that there is a mask."""
    size = (max(1, batch_tokens // length), length)
    pieces: list[Any] = []
    for ids in tokens.ids:
        pieces.append(ids)
        if sum(map(len, pieces)) >= size[0] * length:
            break
    ids = np.resize(np.concatenate([*pieces, np.zeros(1, np.int32)]), size).astype(np.int64)
    mask = np.ones(size, bool)
    mask[-1, -1] = False
    return Batch(0, int(mask.sum()), np.minimum(ids, vocab_size - 1), mask)


def is_full(error: RuntimeError) -> bool:
    """Whether memory is what was missing: torch's own error, or that of a library which takes its own."""
    return isinstance(error, torch.OutOfMemoryError) or any(says in str(error) for says in FULL)


def device_full(error: BaseException, plan: Plan, n_committed: int) -> EnvironmentFault:
    """The error of a run whose device ran out of memory: a plan is fixed, so nothing is tried here."""
    less = plan.batch_tokens // 2
    lower = f"batch_tokens={less}" if less >= plan.sequence_length else "a lower sequence_length"
    first = str(error).split("\n", 1)[0].split(". ", 1)[0][:120]
    if not n_committed:
        return EnvironmentFault(f"the device ran out of memory ({first}). Nothing was committed; set {lower}")
    return EnvironmentFault(
        f"the device ran out of memory ({first}). {n_committed} of {plan.n_blocks} blocks are committed and "
        f"stay; free memory on it and {CONTINUES}. A store keeps its batch_tokens={plan.batch_tokens}: with "
        f"{lower}, begin another one"
    )
