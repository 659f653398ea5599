"""Which blocks there are, which files nobody knows, and what must add up over all blocks.

In: the ground, and the checked blocks one after another. Out: problems: missing blocks, stray files, totals
that differ from the manifest or the vocabulary. Cost: passes over the listing; memory: one count per token
id of the vocabulary and two numbers per block.
"""

import numpy as np

from .durable import PARTIAL
from .folder import GROUP, VOCABULARY, WHOLE_ARRAYS, show_numbers
from .incomplete import PULLING, PUSHING
from .manifest import MANIFEST, SEALED
from .metadata import ArraySpec
from .places import Place
from .plan import Plan
from .records import FOLDER as BLOCKS
from .records import record_name
from .verify_blocks import CheckedBlock
from .verify_findings import Findings, fault
from .verify_ground import Ground
from .verify_rows import is_selection

LITTER = (".DS_Store", "Thumbs.db", "desktop.ini")
NODES = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")
WHOLE = tuple(f"{GROUP}/{name}/" for name in WHOLE_ARRAYS)


def blocks_to_check(place: Place, ground: Ground, findings: Findings) -> list[int]:
    """Numbers of the blocks that are to be there: all of a sealed store, else those with a record."""
    numbers = _numbers(ground.listing or {})
    if ground.plan is None:
        numbers |= _numbers(set(ground.manifest.files) if ground.manifest else set())
        if not ground.sealed:
            findings.add("incomplete", SEALED, _unsealed(ground, "it has no seal"))
        return sorted(numbers)
    planned = range(ground.plan.n_blocks)
    if ground.sealed:
        return list(planned)
    if ground.listing is None:
        numbers = {block for block in planned if _size(place, record_name(block)) is not None}
    missing = sorted(set(planned) - numbers)
    if missing:
        text = f"{len(missing)} of {len(planned)} blocks are missing ({show_numbers(missing)})"
        tokens = _one_range(ground.plan, missing)
        findings.add("incomplete", record_name(missing[0]), _unsealed(ground, text), tokens=tokens)
    else:
        text = f"all {len(planned)} blocks are there but no seal"
        findings.add("incomplete", SEALED, _unsealed(ground, text, "run `nearline seal`"))
    return sorted(numbers & set(planned))


def _one_range(plan: Plan, blocks: list[int]) -> tuple[int, int] | None:
    """The tokens of blocks that follow each other without a gap; None for others."""
    first, last = blocks[0], blocks[-1]
    if last - first + 1 != len(blocks):
        return None
    return plan.block_range(first)[0], plan.block_range(last)[1]


def check_strays(ground: Ground, findings: Findings, blocks: list[int]) -> None:
    """Files in the folders of arrays and blocks that the store does not know. Harmless are temporary files,
    what file browsers leave, chunk objects that a writer left before it could commit their block, and
    whatever else no reader looks at. A problem is what programs that know Zarr take for an array."""
    if not ground.specs:
        return  # nothing says what the store consists of
    plan, there = ground.plan, set(blocks)
    known = {f"{GROUP}/zarr.json", *ground.whole_files}
    known |= {f"{GROUP}/{spec.name}/zarr.json" for spec in ground.specs.values()}
    known |= {record_name(block) for block in range(plan.n_blocks if plan else 0)}
    arrays = {spec.name: spec for spec in ground.specs.values()}
    for name in ground.listing or ():
        if name.endswith(PARTIAL) or (ground.sealed and name in (PUSHING, PULLING)):
            findings.leftovers.append(name)
        elif not name.startswith((f"{GROUP}/", f"{BLOCKS}/")) or name in known:
            continue
        elif (block := _block_of(name, arrays)) is not None:
            if block not in there and not ground.copying:
                findings.leftovers.append(name)
        elif ground.manifest is None and name.startswith(WHOLE):
            continue  # of a small array whose own metadata is lost or yet to come
        else:
            _stray(findings, name)


def _stray(findings: Findings, name: str) -> None:
    folder, _, last = name.rpartition("/")
    if last in LITTER or last.startswith("._"):
        findings.leftovers.append(name)
    elif last in NODES and name.startswith(f"{GROUP}/"):
        which = "the file" if folder == GROUP else folder
        text = f"nothing in the store knows this file, and programs that read Zarr show it; remove {which}"
        findings.add("stray", name, text)
    else:
        findings.strays.append(name)


class Totals:
    """Sums over the blocks, compared at the end."""

    def __init__(self, ground: Ground, findings: Findings) -> None:
        self.ground, self.findings = ground, findings
        self._n_objects = self._n_bytes = self._n_blocks = self._n_counted = 0
        self._sure = True
        self._counts = np.zeros(0 if ground.vocabulary is None else len(ground.vocabulary[0]), np.int64)
        self._sequences: list[tuple[int, int, int]] = []

    def add(self, block: int, found: CheckedBlock) -> None:
        self._n_blocks += 1
        self._n_objects += found.n_objects
        self._n_bytes += found.n_bytes or 0
        self._sure &= found.n_bytes is not None
        if found.sequences is not None:
            self._sequences.append((*found.sequences, block))
        if found.tokens is not None and self.ground.vocabulary is not None:
            self._count(block, *found.tokens)

    def check(self) -> None:
        """After the last block."""
        self._check_manifest()
        self._check_vocabulary()
        self._check_sequences()

    def _count(self, block: int, ids: np.ndarray, counts: np.ndarray) -> None:
        assert self.ground.vocabulary is not None
        known = self.ground.vocabulary[0]
        places = np.searchsorted(known, ids)
        there = np.zeros(len(ids), bool)
        inside = places < len(known)
        there[inside] = known[places[inside]] == ids[inside]
        self._counts[places[there]] += counts[there]
        self._n_counted += 1
        if not there.all() and self.ground.plan is not None:
            text = f"token id {int(ids[~there][0])} is not in {VOCABULARY}"
            file = f"{GROUP}/token_id/c/{block}"
            tokens = self.ground.plan.block_range(block)
            self.findings.add("values", file, text, array="token_id", tokens=tokens)

    def _check_manifest(self) -> None:
        manifest, plan = self.ground.manifest, self.ground.plan
        if manifest is None or plan is None or not self._sure or self._n_blocks != plan.n_blocks:
            return
        for key, value in (("n_objects", self._n_objects), ("chunk_bytes", self._n_bytes)):
            if getattr(manifest, key) != value:
                text = f"`{key}` is {getattr(manifest, key)}, the block records have {value}"
                self.findings.add("metadata", MANIFEST, text)

    def _check_vocabulary(self) -> None:
        plan, vocabulary = self.ground.plan, self.ground.vocabulary
        if plan is None or vocabulary is None or self._n_counted != plan.n_blocks:
            return
        wrong = np.flatnonzero(self._counts != vocabulary[1])
        if wrong.size:
            token, stated, found = (int(v[wrong[0]]) for v in (*vocabulary, self._counts))
            text = f"token id {token} is counted {stated} times, `token_id` holds it {found} times"
            self.findings.add("metadata", VOCABULARY, text)

    def _check_sequences(self) -> None:
        """Of a selection: no number stands in two blocks."""
        attributes, plan = self.ground.attributes, self.ground.plan
        if attributes is None or plan is None or not is_selection(attributes):
            return
        last = -1
        for first, stop, block in sorted(self._sequences):
            if first <= last:
                text = f"sequence {first} stands in another block too"
                file = f"{GROUP}/sequence/c/{block}"
                tokens = plan.block_range(block)
                self.findings.add("values", file, text, array="sequence", tokens=tokens)
            last = max(last, stop)


def _block_of(name: str, arrays: dict[str, ArraySpec]) -> int | None:
    """The block of a chunk object; None for a name that no chunk of these arrays has."""
    array, _, rest = name.removeprefix(f"{GROUP}/").partition("/")
    spec, parts = arrays.get(array), rest.split("/")
    if spec is None or parts[0] != "c" or len(parts) != len(spec.dims) + 1:
        return None
    index = [int(part) if part.isascii() and part.isdigit() else -1 for part in parts[1:]]
    grid = [-(-size // chunk) for size, chunk in zip(spec.shape, spec.chunks, strict=True)]
    if spec.key(*index) != f"{array}/{rest}" or any(i >= n for i, n in zip(index, grid, strict=True)):
        return None
    return index[spec.dims.index("token")]


def _unsealed(
    ground: Ground, text: str, what: str = "the same `nearline collect` command continues it"
) -> str:
    if ground.mark is None:
        copy = "; if it is a copy, copy it again" if ground.copying else ""
        return f"the store is not sealed: {text}; {what}{copy}"
    kind, again = ground.copy_words
    return f"{kind}: {text}; {again}"


def _size(place: Place, name: str) -> int | None:
    try:
        return place.size(name)
    except OSError as error:
        raise fault(place, name, error) from error


def _numbers(names: "set[str] | dict[str, int]") -> set[int]:
    """Block numbers of the records among the names."""
    stems = {name: name[len(BLOCKS) + 1 : -5] for name in names if name.startswith(f"{BLOCKS}/")}
    return {
        int(stem)
        for name, stem in stems.items()
        if stem.isascii() and stem.isdigit() and record_name(int(stem)) == name
    }
