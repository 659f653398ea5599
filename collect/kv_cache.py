"""One step of decoding with a KV cache, under either of the names that transformers has for it.

In: a causal language model, the next tokens, the cache of those before. Out: their logits and the cache.
transformers called the argument and the output `past_key_values` before it called both `cache`; models of
somebody's own code keep the older name. Cost: the forward pass.
"""

import inspect
from collections.abc import Mapping
from typing import Any, Final

from jaxtyping import Float, Int
from torch import Tensor

NAMES: Final = ("cache", "past_key_values")


def decoded(
    model: Any, ids: Int[Tensor, "sequence position"], cache: Any = None
) -> tuple[Float[Tensor, "sequence position vocabulary"], Any]:
    """Logits of `ids`, which follow what is in `cache`, and the cache with them in it."""
    known = inspect.signature(model.forward).parameters
    name = next((name for name in NAMES if name in known), NAMES[-1])
    given = {} if cache is None else {name: cache}
    output = model(input_ids=ids, use_cache=True, **given)
    # Newer outputs answer to the older name with a warning, so it is asked for last.
    return output.logits, next(filter(_is_there, (getattr(output, one, None) for one in NAMES)), None)


def cache_in(named: Mapping[str, Any]) -> Any:
    """The cache among named arguments or outputs; None where there is none."""
    return next((named[name] for name in NAMES if named.get(name) is not None), None)


def cached_length(named: Mapping[str, Any]) -> Any:
    """How many positions the cache among these arguments holds already."""
    cache = cache_in(named)
    return 0 if cache is None else cache.get_seq_length()


def _is_there(value: Any) -> bool:
    return value is not None  # an empty cache is one too
