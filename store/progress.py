"""How library code reports progress: through a callback it is given, and in no other way.

In: stage, units done, units in total, the unit's name. Out: nothing. Words go through
`logging.getLogger("nearline")`.
"""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """Called now and then while a stage runs; must return quickly and may be called from any thread."""

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None: ...


def silent(stage: str, done: int, total: int, unit: str) -> None:
    """Report nothing."""
