"""What the checks of `verify` may rely on, and how a file comes to be relied on.

In: nothing; values. Out: Ground, which holds attributes, plan and manifest as far as they are sound, and
`definition_file`, which hands out a metadata file only if it is what was sealed. Cost: one read per file.
"""

from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3
from jaxtyping import Int

from .attributes import Attributes
from .incomplete import copy_words
from .manifest import Manifest
from .metadata import ArraySpec
from .plan import Plan
from .records import record_name
from .verify_findings import RESTORE, Findings

Vocabulary = tuple[Int[np.ndarray, " id"], Int[np.ndarray, " id"]]  # token ids in order, and their counts


@dataclass(frozen=True, slots=True, eq=False)
class Ground:
    """What may be relied on; None or empty where the files that say it are damaged."""

    listing: dict[str, int] | None  # None: the place cannot be listed
    sealed: bool  # there is a SEALED
    copying: bool  # not sealed, but an unfinished copy of a store that was
    mark: str | None  # of the push or pull that makes this copy, as long as it is unfinished
    digest: str | None
    manifest: Manifest | None  # only if the seal vouches for it
    attributes: Attributes | None = None
    plan: Plan | None = None
    specs: dict[str, ArraySpec] = field(default_factory=dict)
    whole_files: frozenset[str] = frozenset()  # files of the small arrays
    expected: frozenset[str] = frozenset()  # files that an unfinished copy is to have
    vocabulary: Vocabulary | None = None  # if it can be relied on

    @property
    def copy_words(self) -> tuple[str, str]:
        """What this unfinished copy is called, and how to go on with it."""
        return copy_words(self.mark)

    def again(self, block: int) -> str:
        """What brings a chunk object of a block back."""
        if self.sealed:
            return f"`nearline repair` collects block {block} again, or fetch the file from a copy"
        return (
            f"remove {record_name(block)}, and the same `nearline collect` command collects the block again"
        )

    def layer(self, index: int | None) -> int | None:
        """The model's number of a layer of the arrays."""
        if index is None or self.attributes is None or index >= len(self.attributes.storage.layers):
            return None
        return self.attributes.storage.layers[index]


def vouched(
    ground: Ground, findings: Findings, name: str, content: bytes, tokens: tuple[int, int] | None = None
) -> bool:
    """The content is the one that was sealed; a problem otherwise. Unsealed stores vouch for nothing."""
    if ground.manifest is None:
        return True
    sealed = ground.manifest.files.get(name)
    if sealed is None:
        return True  # named once, where the names of the manifest are checked
    if sealed.size != len(content):
        text = f"the file has {len(content)} bytes, {sealed.size} were sealed; {RESTORE}"
        findings.add("size", name, text, tokens=tokens)
    elif sealed.digest != blake3(content).hexdigest():
        text = f"the file is not the one that was sealed; {RESTORE}"
        findings.add("content", name, text, tokens=tokens)
    else:
        return True
    return False


def definition_file(ground: Ground, findings: Findings, name: str) -> bytes | None:
    """Content of a metadata file, if it is there and is what was sealed."""
    if ground.sealed:
        content = findings.fetch(name)
    else:
        content = findings.fetch(name, None)
        if content is None:
            never = "the store was not begun to its end; repeat the same `nearline collect` command"
            again = "; ".join(ground.copy_words) if ground.copying else never
            findings.add("incomplete", name, f"the file is missing: {again}")
    return content if content is not None and vouched(ground, findings, name, content) else None
