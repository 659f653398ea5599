"""The sites that a harvest can store, and a choice of them as a person writes it.

In: `"embedding,residual"`, `"+mlp_input"` (the default ones and this) or a list. Out: names in the order in
which a store lists them, or one sentence that names the unknown one and the nearest that is known. Cost:
none; needs no torch.
"""

import difflib
from collections.abc import Iterable

from ..store.dtypes import GRADIENT
from ..store.errors import UsageError

LAYER_SITES = ("residual", "mlp_output", "mlp_input", GRADIENT)
SITES = (*LAYER_SITES, "embedding")  # the order in which a store lists those it has
DEFAULT_SITES = ("residual", "mlp_output", "embedding")
MOMENTS_SITES = ("residual", "mlp_output")  # what a surrogate is fitted on


def parse_sites(value: str | Iterable[str]) -> tuple[str, ...]:
    """The chosen sites, each once; behind a leading + those beside the default ones."""
    names = [name.strip() for name in (value.split(",") if isinstance(value, str) else value)]
    if names == ["all"]:
        return SITES
    if names and names[0].startswith("+"):
        names = [*DEFAULT_SITES, *(name.removeprefix("+").strip() for name in names)]
    for name in names:
        if name not in SITES:
            near = difflib.get_close_matches(name, SITES, n=1, cutoff=0.5)
            # Which there are, stands in what the setting itself means.
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(
                f"sites={','.join(names)}: there is no site {name!r}; {hint}"
                "`nearline sites MODEL` says what each is"
            )
    if not names:
        raise UsageError(f"sites: at least one of {', '.join(SITES)} is stored")
    return tuple(site for site in SITES if site in names)
