"""What a harvest needs of the machine: memory, space and files, computed here and nowhere else.

In: a model's anatomy, the shape of a block buffer, a plan. Out: a frozen `Needs`, and the refusal, in one
sentence, of what cannot fit. Buffers, weights and files are exact; the working memory of a forward pass is an
estimate from the widths of one block: what is alive at once in its MLP, and in its attention where the
scores are formed. Cost: a look at the shapes of the weights.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..store.dtypes import GRADIENT
from ..store.durable import check_space
from ..store.errors import EnvironmentFault, UsageError
from ..store.layout import BLOCK_BUFFERS, CRC_BYTES, block_bytes, n_objects, store_bytes
from ..store.plan import Plan
from .anatomy import Anatomy, unwrapped
from .available import available_memory_bytes, free_device_bytes, free_files
from .buffers import Shape, pinned_bytes
from .lanes import PLACES
from .nll import rows_per_chunk
from .residence import runs_on

SMALL_FILES = 31  # at most: 12 growing arrays, 6 whole ones with a chunk each, and 7 files beside them
SCORES_FORMED = ("eager",)  # attention implementations that hold a score for each pair of positions
# Copies alive at once of a row's stream (those of the norm, the hook and the residual among them) and of its
# inner values in the MLP (some activation functions are formulas of many steps). With these, estimates were
# 0.9 to 1.7 times what Llama, GPT-2 and GPT-NeoX took on a CPU in float32 and bfloat16.
STREAM_COPIES, INNER_COPIES = 6, 4
# The same, of what one block leaves behind for the backward pass: estimates were 1.0 to 2.7 times what Llama,
# GPT-2, GPT-NeoX, OPT and Gemma 2 kept in float32 and bfloat16.
GRAPH_STREAM_COPIES, GRAPH_INNER_COPIES = 10, 4
PRODUCT_ROWS = 2048  # of one product of rows with rows, where moments are summed
N_SMALL_SUMS = 5  # arrays of a layer's moments beside the two of matrices, the contribution's among them


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes, by where they are: in the host's memory, on the device (a CPU's is the host's), on the disk."""

    device: str
    model_bytes: int  # device
    batch_bytes: int  # device: activations of the largest batch
    logits_bytes: int  # device: logits of a few hundred rows and their loss
    buffer_bytes: int  # host: a block being filled and one being written
    packing_bytes: int  # host: the chunk being encoded
    store_bytes: int  # disk: all chunk objects, before any compressor
    n_files: int
    n_folders: int
    most_entries: int  # of one folder
    chunk_bytes: int  # of the largest file
    n_chunks: int = 0  # objects of moments
    moments_bytes: int = 0  # device: sums of all layers, and what it takes to add to them

    @property
    def device_bytes(self) -> int:
        """The peak on the device."""
        return self.model_bytes + self.batch_bytes + self.logits_bytes + self.moments_bytes

    @property
    def host_bytes(self) -> int:
        """What a run takes of the host beyond the process as it is with its model loaded."""
        here = self.device_bytes - self.model_bytes if self.device == "cpu" else 0
        return self.buffer_bytes + self.packing_bytes + here


def working_device(anatomy: Anatomy) -> torch.device:
    """Where a pass is computed: the first GPU that one of its layers runs on, which need not be the device
    of the ids; a CPU where there is none."""
    devices = [anatomy.device, *(runs_on(layer.mlp_first) for layer in anatomy.layers)]
    found = next((device for device in devices if device.type != "cpu"), anatomy.device)
    if found.type not in ("cpu", "cuda"):
        raise UsageError(
            f"the model is on {found}; a harvest runs on a CPU or on CUDA devices. Move it to one of them, "
            'for example with model.to("cpu").'
        )
    return found


def needs_of(anatomy: Anatomy, shape: Shape, plan: Plan, n_sums: int = 0) -> Needs:
    """Of a whole harvest by this plan. `n_sums`: of a layer, where sums are stored instead of rows."""
    sizes, n_arrays, device = shape.sizes, len(shape.slots), working_device(anatomy)
    buffer_bytes = block_bytes(shape.block, *sizes)
    if device.type != "cpu":
        buffer_bytes += pinned_bytes(shape)
    chunk_bytes = shape.block * shape.d_model * shape.itemsize + CRC_BYTES
    padded, longest = largest_batch(plan)
    graph_bytes, graphs = 0, 1
    if GRADIENT in shape.sites:
        graph_bytes, graphs = block_graph_bytes(anatomy, padded, longest), 2
        graph_bytes *= anatomy.n_layers - min(shape.layers)
    needs = Needs(
        device=device.type,
        model_bytes=model_bytes(anatomy),
        batch_bytes=activation_bytes(anatomy, padded, longest)
        + graph_bytes
        + copies_bytes(device, shape, padded),
        logits_bytes=logits_bytes(anatomy, padded) * graphs,
        buffer_bytes=BLOCK_BUFFERS * buffer_bytes,
        packing_bytes=chunk_bytes,
        store_bytes=store_bytes(plan.n_tokens, shape.block, *sizes),
        n_files=n_objects(plan.n_tokens, shape.block, *sizes[1:3]) + SMALL_FILES,
        n_folders=plan.n_blocks * n_arrays,
        most_entries=max(plan.n_blocks, len(shape.layers)),
        chunk_bytes=chunk_bytes,
    )
    return needs if not n_sums else replace(needs, **moments_needs(shape, padded, n_sums))


def moments_needs(shape: Shape, padded: int, n_sums: int) -> dict[str, int]:
    """What differs where each layer is summed in float64 and no row is stored: no block buffers; on the host
    one layer's sums on their way to the disk, as they are, stacked and in the file's hands.
    """
    n_layers, width = len(shape.layers), shape.d_model
    layer = n_sums * (2 * width * width + 3 * width + 1) * 8
    at_work = 2 * width * width * 4 + (2 * padded + 4 * min(padded, PRODUCT_ROWS)) * width * 4
    n_chunks = n_layers * (2 * n_sums + N_SMALL_SUMS)
    n_arrays = N_SMALL_SUMS + 2
    return {
        "moments_bytes": n_layers * layer + at_work,
        "buffer_bytes": 0,
        "packing_bytes": 2 * layer,
        "store_bytes": n_layers * layer,
        "n_chunks": n_chunks,
        "n_files": n_chunks + n_layers * (n_arrays + 1) + 2,
        "n_folders": n_layers * (18 + 4 * n_sums),
        "most_entries": max(n_layers + 2, n_sums),
        "chunk_bytes": width * width * 8 + CRC_BYTES,
    }


def largest_batch(plan: Plan) -> tuple[int, int]:
    """Padded tokens of the largest batch, and the longest sequence."""
    return int(padded_tokens(plan).max()), int(plan.length.max())


def padded_tokens(plan: Plan) -> np.ndarray:
    """Of each batch: its number of sequences times the longest of them."""
    starts = np.flatnonzero(np.diff(plan.sequence_batch, prepend=-1))
    return np.maximum.reduceat(plan.length, starts).astype(np.int64) * np.diff(
        starts, append=plan.n_sequences
    )


def model_bytes(anatomy: Anatomy) -> int:
    """Weights and buffers, shared ones once."""
    model = anatomy.model
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def activation_bytes(anatomy: Anatomy, padded: int, longest: int) -> int:
    """What a forward pass of `padded` tokens holds at its peak."""
    return padded * _row_bytes(anatomy, longest, STREAM_COPIES, INNER_COPIES)


def block_graph_bytes(anatomy: Anatomy, padded: int, longest: int) -> int:
    """What one block of a forward pass of `padded` tokens keeps until the backward pass has come to it."""
    return padded * _row_bytes(anatomy, longest, GRAPH_STREAM_COPIES, GRAPH_INNER_COPIES)


def _row_bytes(anatomy: Anatomy, longest: int, stream_copies: int, inner_copies: int) -> int:
    block, itemsize = anatomy.layers[0].block, anatomy.dtype.itemsize
    inner = max((max(weight.shape) for weight in block.parameters() if weight.ndim > 1), default=0)
    row = stream_copies * anatomy.d_model + inner_copies * inner
    config: Any = unwrapped(anatomy.model).config
    scores = 0
    if getattr(config, "_attn_implementation", None) in SCORES_FORMED:
        n_heads = getattr(config.get_text_config(), "num_attention_heads", 1)
        scores = 2 * n_heads * longest * max(itemsize, 4)  # before and after the softmax
    return row * itemsize + scores


def logits_bytes(anatomy: Anatomy, padded: int) -> int:
    """Logits of as many rows as go at once, as the head gives them and in float32, and their log-softmax."""
    rows, itemsize = min(rows_per_chunk(anatomy.vocab_size), padded), anatomy.dtype.itemsize
    return rows * anatomy.vocab_size * (8 if itemsize == 4 else itemsize + 8)


def copies_bytes(device: torch.device, shape: Shape, padded: int) -> int:
    """Rows on their way from a GPU to the host."""
    if device.type == "cpu":
        return 0
    return PLACES * padded * shape.d_model * shape.itemsize


def check_needs(needs: Needs, folder: Path, missing_bytes: int, *, measured: bool = False) -> None:
    """Refuse what cannot fit, before the first forward pass. `missing_bytes` of the store are not written
    yet, into `folder` (which exists) or one below it. `measured`: a batch was tried on the device."""
    check_host(needs.buffer_bytes, needs.host_bytes - needs.buffer_bytes, needs.moments_bytes)
    if not measured or needs.moments_bytes:  # a batch was tried without the sums beside it
        check_device(needs)
    check_space(folder, missing_bytes, ", or lower tokens, layers or the storage dtype")
    check_files(folder, (needs.n_files + needs.n_folders) * missing_bytes // needs.store_bytes)


def check_host(buffer_bytes: int, other_bytes: int, moments_bytes: int = 0) -> None:
    available = available_memory_bytes()
    if moments_bytes and buffer_bytes + other_bytes > available:
        raise EnvironmentFault(
            f"moments need {moments_bytes / 2**20:,.1f} MiB and the rest of a run "
            f"{(buffer_bytes + other_bytes - moments_bytes) / 2**20:,.1f} MiB, this machine has "
            f"{available / 2**20:,.1f} MiB available. "
            "Take fewer layers at once, or lower folds."
        )
    if buffer_bytes + other_bytes > available:
        raise EnvironmentFault(
            f"block buffers need {buffer_bytes / 2**20:,.1f} MiB and a batch {other_bytes / 2**20:,.1f} MiB, "
            f"this machine has {available / 2**20:,.1f} MiB available. "
            "Set a lower memory_limit, a smaller block or batch_tokens, or fewer layers or sites."
        )


def check_device(needs: Needs) -> None:
    """The model is on the device already: only what a batch takes is still to come."""
    free, more = free_device_bytes(needs.device), needs.device_bytes - needs.model_bytes
    if free is not None and more > free and needs.moments_bytes > more // 2:
        raise EnvironmentFault(
            f"moments need {needs.moments_bytes / 2**20:,.1f} MiB on the GPU and a batch "
            f"{(more - needs.moments_bytes) / 2**20:,.1f} MiB beside the model, {free / 2**20:,.1f} MiB are "
            "free. Take fewer layers at once, or lower folds."
        )
    if free is not None and more > free:
        raise EnvironmentFault(
            f"one batch needs {more / 2**20:,.1f} MiB on the GPU beside the model, "
            f"{free / 2**20:,.1f} MiB are free. Set a lower batch_tokens, or a shorter sequence_length."
        )


def check_files(folder: Path, need: int) -> None:
    """A chunk costs a file and a folder, and some file systems are made for few of them."""
    free = free_files(folder)
    if free is not None and need > free:
        raise EnvironmentFault(
            f"{folder}: {need:,} files and folders are needed, the file system has room for {free:,}; "
            "choose another disk, a larger block, or lower tokens or layers"
        )
