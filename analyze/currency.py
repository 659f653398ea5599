"""Which results of a study still belong to what they were made from: its provenance in, names of steps out.

A step's record holds digests of what it read: files of other steps by their path inside the study, stores by
their name. A step is stale where one of these is there no longer, or is another one by now. Cost: one small
JSON file read.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any

from ..store import Study
from ..store.names import printable
from .analyze_settings import ANALYSES

FIT = "fit"
_LOG = logging.getLogger("nearline")


def stale_steps(study: Study) -> list[str]:
    """Recorded steps that were made from results or stores which have been replaced since, and steps made
    from those.
    """
    steps = study.provenance()
    stale: list[str] = []
    while found := [name for name in steps if _is_stale(name, steps)]:
        stale += found
        for name in found:
            del steps[name]
    return sorted(stale)


def drop_stale(study: Study, keep: Collection[str] = ()) -> list[str]:
    """Remove the results of stale steps, so that nobody takes them for results of what is there now."""
    dropped = [name for name in stale_steps(study) if name not in keep]
    steps = study.provenance()
    for name in dropped:
        study.drop_step(name)
        removed = ", ".join(steps[name]["outputs"])
        _LOG.info("%s: removed %s, which was of the results before", study.path, printable(removed))
    return dropped


def _is_stale(name: str, steps: Mapping[str, Mapping[str, Any]]) -> bool:
    files = {output: digest for step in steps.values() for output, digest in step["outputs"].items()}
    stores = steps[FIT]["inputs"] if FIT in steps else {}
    for key, digest in steps[name]["inputs"].items():
        if "/" in key or key.endswith(".zarr"):
            if files.get(key) != digest:
                return True
        elif name in ANALYSES and stores.get(key) != digest:
            return True
    return False
