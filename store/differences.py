"""What differs between the settings a store was begun with and those of a run that wants to continue it.

In: two Attributes. Out: the first difference in words, with both values, causes before consequences: a
changed model is named as such and not as a changed plan. Cost: none.
"""

from typing import Any

from .attributes import Attributes

_SECTIONS = ("model", "tokenizer", "corpus", "plan", "storage", "compute", "norm", "policies", "versions")
_LAST = ("corpus.n_documents", "corpus.n_groups", "plan.n_blocks", "plan.digest")  # they follow from others
_WORDS = {
    "model.config_hash": "the configuration of the model",
    "model.weights_hash": "the weights of the model",
    "tokenizer.fingerprint": "the tokenizer",
    "tokenizer.ids": "the tokenizer",
    "corpus.content_hash": "the texts of the corpus",
    "corpus.n_groups": "the groups of near-duplicates",
    "plan.n_tokens": "the number of token rows",
    "plan.digest": "the order of the rows",
    "compute.torch_threads": "the number of threads",
}
_HASHES = ("_hash", "digest", "fingerprint")
_SHOWN_DIGITS = 12
_SHOWN = 60


def difference(begun: Attributes, now: Attributes) -> str | None:
    """The first difference between a store's settings and a run's; None when the run may continue the store.

    The errors that the start-up proof measured may differ: another machine rounds otherwise.
    """
    for entry in begun.lineage:
        if entry["kind"] == "shortened":
            return (
                f"the store was shortened to {begun.plan.n_tokens} token rows by `nearline seal --partial`, "
                "its other blocks are gone; name a new folder"
            )
        if entry["kind"] == "selection":
            return "the store is a part that was pulled out of another store; name a new folder"
    one, other = _settings(begun), _settings(now)
    names = [*one, *(name for name in other if name not in one)]
    for name in sorted(names, key=_rank):
        was, has = one.get(name, "nothing"), other.get(name, "nothing")
        if was != has:
            words = f"{_WORDS[name]}, " if name in _WORDS else ""
            was, has = _shown(name, was, has)
            return (
                f"the store was begun with {words}`{name}` = {was}, this run has {has}; "
                "name a new folder, or repeat the settings"
            )
    return None


def proof_difference(begun: Attributes, now: Attributes) -> str | None:
    """The first of the proof's errors that this run measured otherwise."""
    for name in sorted({*begun.proof, *now.proof}):
        was, has = begun.proof.get(name), now.proof.get(name)
        if was != has:
            return f"`proof.{name}` is {was} in the store and {has} in this run"
    return None


def _rank(name: str) -> tuple[bool, int, bool]:
    """Sections in their order, in each what a person reads before the hashes; last what only follows."""
    return name in _LAST, _SECTIONS.index(name.partition(".")[0]), name.endswith(_HASHES)


def _settings(attributes: Attributes) -> dict[str, Any]:
    """`section.name` to value, in the order of the sections."""
    found = attributes.to_dict()
    return {f"{section}.{name}": value for section in _SECTIONS for name, value in found[section].items()}


def _shown(name: str, was: Any, has: Any) -> tuple[str, str]:
    """Both values, short, but never so short that they look alike."""
    if name.endswith(_HASHES) and isinstance(was, str) and isinstance(has, str):
        n_digits = next(
            (n for n in (_SHOWN_DIGITS, 2 * _SHOWN_DIGITS) if was[:n] != has[:n]), max(len(was), len(has))
        )
        return repr(was[:n_digits]), repr(has[:n_digits])
    shown = repr(was), repr(has)
    if isinstance(was, list) and isinstance(has, list) and max(map(len, shown)) > _SHOWN:
        index = next((i for i, (a, b) in enumerate(zip(was, has, strict=False)) if a != b), None)
        if index is None:
            return f"{len(was)} values", f"{len(has)} values"
        return f"{was[index]!r} at place {index}", f"{has[index]!r} there"
    return shown
