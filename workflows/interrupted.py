"""What is kept of a step that a signal stopped, in one sentence.

In: the kind of a step, and the work. Out: an error that says what is there already, and what the same command
does next. A harvest stops in good order and says so itself (collect/stopping.py). Cost: none.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Final

from ..collect.stopping import Interrupted

_MEASURED: Final = "the blocks that were measured are kept; the same command goes on behind them"
KEPT: Final[Mapping[str, str]] = {
    "fit": "nothing of this fit is kept, and what was there before stays; the same command begins it again",
    "losses": _MEASURED,
    "analyze": "the analyses that were finished are kept; the same command goes on with the others",
    "measure": _MEASURED,
    "finetune": (
        "the finished courses, and the last checkpoint of the one in hand, are kept; the same command goes "
        "on from there"
    ),
}


@contextmanager
def saying_what_is_kept(kind: str, name: str | None = None) -> Generator[None]:
    """Of a step of this kind; `name`: how a study calls it, where it is one step of many."""
    try:
        yield
    except KeyboardInterrupt:
        if kind not in KEPT:
            raise
        raise Interrupted(f"interrupted{f' in {name}' if name else ''}: {KEPT[kind]}") from None
