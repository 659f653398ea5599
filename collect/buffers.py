"""Block buffers: the activations of one block on the host, in the storage dtype.

In: which sites and layers, how many rows. Out: one tensor per site to copy rows into, and the same memory as
the arrays that the store takes. Cost: each buffer is allocated once, pinned where a GPU copies into it, and
lives as long as the run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..store.dtypes import GRADIENT
from .site_names import DEFAULT_SITES, LAYER_SITES

TORCH_DTYPE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SEEN_ORDER = ("residual", "mlp_input", "mlp_output", GRADIENT)  # in which a layer shows them


@dataclass(frozen=True, slots=True)
class Shape:
    """What one block buffer holds."""

    layers: tuple[int, ...]
    d_model: int
    block: int
    storage_dtype: str
    sites: tuple[str, ...] = DEFAULT_SITES

    @property
    def layer_sites(self) -> tuple[str, ...]:
        """Those of the sites that each layer has."""
        return tuple(site for site in self.sites if site in LAYER_SITES)

    @property
    def slots(self) -> list[tuple[str, int | None]]:
        """Every (site, layer) that a forward pass brings, in the order in which it does."""
        first: list[tuple[str, int | None]] = [("embedding", None)] if "embedding" in self.sites else []
        chosen = [site for site in _SEEN_ORDER if site in self.sites]
        return [*first, *((site, layer) for layer in self.layers for site in chosen)]

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """The storage dtype as torch has it."""
        return TORCH_DTYPE[self.storage_dtype]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """d_model, layers, sites, itemsize as the store's arithmetic counts them. It counts layers · sites
        arrays and the embedding; nothing but the number of arrays matters to it, so one of ours may stand for
        the embedding where that is not stored."""
        return self.d_model, 1, len(self.slots) - 1, self.itemsize


class BlockBuffer:
    """The activations of one block on the host, in the storage dtype. `thin`: all layers share one place,
    which is enough where nothing will be read."""

    def __init__(self, shape: Shape, pinned: bool, *, thin: bool = False) -> None:
        self.sites = {site: _site_buffer(site, shape, pinned, thin) for site in shape.sites}

    def stored(self, rows: int) -> dict[str, np.ndarray]:
        """The first `rows` rows as the store keeps them: bfloat16 as its bits; views, no copies."""
        found = {}
        for site, tensor in self.sites.items():
            view = tensor[:, :rows]
            array = (view.view(torch.uint16) if view.dtype == torch.bfloat16 else view).numpy()
            found[site] = array if site in LAYER_SITES else array[0]
        return found


def _site_buffer(site: str, shape: Shape, pinned: bool, thin: bool) -> Tensor:
    n_layers = len(shape.layers) if site in LAYER_SITES else 1
    there = 1 if thin else n_layers
    size = (there, shape.block, shape.d_model)
    return torch.zeros(size, dtype=shape.dtype, pin_memory=pinned).expand(n_layers, -1, -1)


def pinned_bytes(shape: Shape) -> int:
    """What pinning a block buffer takes beyond its bytes: torch rounds each piece of such memory up to a
    power of two."""
    row, more = shape.block * shape.d_model * shape.itemsize, 0
    for site in shape.sites:
        size = row * (len(shape.layers) if site in LAYER_SITES else 1)
        more += (1 << (size - 1).bit_length()) - size
    return more


def make_buffers(shape: Shape, device: torch.device, count: int = 2) -> Sequence[BlockBuffer]:
    """Block buffers, pinned where a GPU copies into them; two, so that one is filled while one is written."""
    return [BlockBuffer(shape, pinned=device.type == "cuda") for _ in range(count)]
