"""Paths of what is written on this machine: a URL in the place of a folder is refused, not made a folder.

In: a path as a user gave it. Out: the Path, or a UsageError that says what to do instead. Cost: none.
"""

import re
from pathlib import Path

from .errors import UsageError

# `Path` folds the slashes of a URL, so that one folded already is recognised too.
_URL = re.compile(r"(s3|gs|az|hf|https?|file|ftp):/")


def local_path(where: str | Path, what: str) -> Path:
    """`where` as a folder of this machine; `what` is its name in the message: "store", "study"."""
    if isinstance(where, Path) and where.exists():
        return where
    if _URL.match(str(where)):
        raise UsageError(
            f"{where}: a {what} is worked on in a folder on this machine, not behind a URL; name a folder "
            "here, and copy a sealed store with `nearline push` and `nearline pull`"
        )
    return Path(where)
