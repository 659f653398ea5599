"""Which tokens are in the forward pass at work, where they stand, and which of them may go linear.

In: the arguments of a backbone's forward pass, token ids among them. Out: flat rows on the device of the ids.
Where a token stands is read from `position_ids`; else from a 2-D attention mask (the first real token is at
0); else from the length of the cache. Covered are tokens that are not special, not padding and not at
position 0, as in a fit. Cost: a few operations on ids; a GPU is waited for once a pass.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float32, Int
from torch import Tensor, nn

from ..store.errors import UsageError
from .capture import first_tensor
from .kv_cache import cached_length


class Rows:
    """The rows of the forward pass at work, flat, on the device of the ids."""

    def __init__(self, special_ids: tuple[int, ...], parameters: tuple[str, ...]) -> None:
        self._special = torch.tensor(special_ids, dtype=torch.long)
        self._parameters = parameters  # of the backbone's forward, in order
        self._split: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self.token_id: Int[Tensor, "row"] = torch.zeros(0, dtype=torch.long)
        self.position: Int[Tensor, "row"] = self.token_id
        self.covered: Bool[Tensor, "row"] = self.token_id.bool()
        self.stream: Float32[Tensor, "row feature"] | None = None

    def begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the backbone runs: which tokens, where, and which of them may go linear."""
        named = dict(zip(self._parameters, args, strict=False)) | kwargs
        ids = named.get("input_ids")
        if not isinstance(ids, Tensor):
            raise UsageError(
                "a linearised model has to know which tokens are special: give input_ids instead of "
                "inputs_embeds"
            )
        ids = ids.reshape(-1, ids.shape[-1]).long()
        position, real = _places(named, ids)
        self._special = self._special.to(ids.device)
        self._split.clear()
        self.token_id, self.position, self.stream = ids.reshape(-1), position.reshape(-1), None
        covered = real & (position != 0) & ~torch.isin(ids, self._special)
        self.covered = covered.reshape(-1)

    def keep_stream(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What enters the first block."""
        self.stream = copied(first_tensor(args or tuple(kwargs.values())))

    def end(self, *_: Any) -> None:
        self.stream = None

    def split(self, device: torch.device) -> tuple[Int[Tensor, "covered"], Int[Tensor, "others"]]:
        """Numbers of the rows that may go linear, and of the others. A GPU is waited for once a pass."""
        if device not in self._split:
            covered = self.covered.to(device)
            self._split[device] = covered.nonzero().flatten(), (~covered).nonzero().flatten()
        return self._split[device]


def _places(
    named: Mapping[str, Any], ids: Int[Tensor, "sequence position"]
) -> tuple[Int[Tensor, "sequence position"], Bool[Tensor, "sequence position"]]:
    """Positions of the tokens in their sequences, and which of them are no padding."""
    given, length = named.get("position_ids"), ids.shape[1]
    mask = named.get("attention_mask")
    real = torch.ones_like(ids, dtype=torch.bool)
    counted = None
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] >= length:
        mask = mask.to(ids.device).long()
        real, counted = (one[:, -length:].expand(ids.shape) for one in (mask.bool(), mask.cumsum(1) - 1))
    if isinstance(given, Tensor):
        given = given[0] if given.ndim == 3 else given
        return given.to(ids.device).expand(ids.shape), real
    if counted is not None:
        return counted, real
    at = torch.arange(length, device=ids.device) + cached_length(named)
    return at.expand(ids.shape), real


def copied(tensor: Tensor) -> Float32[Tensor, "row feature"]:
    return tensor.detach().reshape(-1, tensor.shape[-1]).to(torch.float32, copy=True)
