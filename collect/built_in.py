"""Built-in English: texts that every installation has, and the fixed part that is set aside for training.

In: the name of a built-in corpus. Out: its (key, text) pairs, and which near-duplicate groups are reserved.
What is reserved depends on keys only, so another version of Python or scipy reserves the same names. Cost:
`docs:python` 0.1 s, `docs:stdlib` 1 to 2 s, `docs:scientific` 2 to 3 s, nearly all of it parsing.
"""

import gc
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from blake3 import blake3
from jaxtyping import Bool, Int32

from .docstrings import docstrings
from .passages import cut_keyed

# Share of each that is set aside. The bundled models were trained on it: a larger share only with new models.
RESERVED = {"docs:python": 0.2, "docs:scientific": 0.5, "docs:stdlib": 0.4}
PACKAGES = {"docs:scientific": ("numpy", "scipy", "sklearn"), "docs:stdlib": ("stdlib",)}
DOCSTRING_CHARS = 200  # shorter docstrings are mostly one-liners


def built_in_texts(spec: str) -> list[tuple[str, str]]:
    """All (key, text) of a built-in, both parts, in a fixed order."""
    if spec == "docs:python":
        return list(reference_passages())
    with collector_at_rest():
        return [
            (key, text)
            for package in PACKAGES[spec]
            for key, text in docstrings(package)
            if len(text) >= DOCSTRING_CHARS
        ]


def reserved_texts(
    keys: Sequence[str], groups: Int32[np.ndarray, " document"], share: float
) -> Bool[np.ndarray, " document"]:
    """Which texts are set aside: whole groups, by the hash of the group's smallest key. Passages go by
    the key of the text they were cut from, since their numbers move when it is edited."""
    smallest: dict[int, str] = {}
    for key, group in zip(keys, groups.tolist(), strict=True):
        name = key.partition("#")[0]
        smallest[group] = min(name, smallest.get(group, name))
    reserved = [hash_share(smallest[group]) < share for group in range(len(smallest))]
    return np.array(reserved, bool)[groups]


def hash_share(name: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    return int.from_bytes(blake3(name.encode()).digest(length=4)) / 2**32


def reference_passages() -> Iterator[tuple[str, str]]:
    """The topics of the language reference, cut into passages. Long topics contain short ones word for word:
    a paragraph is kept where it stands first, or the passages around its copies would be near-duplicates."""
    from pydoc_data.topics import topics  # 0.5 MB of strings that only this corpus needs

    seen: set[str] = set()
    for key, text in sorted(topics.items(), key=lambda topic: (-len(topic[1]), topic[0])):
        fresh = []
        for paragraph in text.split("\n\n"):
            words = " ".join(paragraph.split())
            if words and words not in seen:
                seen.add(words)
                fresh.append(paragraph)
        if fresh:
            yield from cut_keyed(key, "\n\n".join(fresh))


@contextmanager
def collector_at_rest() -> Generator[None]:
    """No garbage collection meanwhile: syntax trees hold no cycles, and tracing them costs a third more."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
