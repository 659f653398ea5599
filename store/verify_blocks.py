"""One block of a store: its record, its chunk objects, the token columns, and which objects to read.

In: the ground to stand on and a block number. Out: problems, and jobs for the objects whose content is to be
read. Called for many blocks at once, on threads. Cost: one read of the record, a look at the size of every
object, and beyond the quick level one read of the token columns; memory: one block's columns.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from .errors import DamageError, FormatError
from .folder import chunk_keys, load_record
from .layout import CRC_BYTES, TOKEN_COLUMNS
from .parsing import parse_json
from .places import Place
from .records import BlockRecord, ChunkRecord, parse_record, record_name
from .verify_findings import Findings, fault, reason, shown
from .verify_ground import Ground, vouched
from .verify_objects import Job, read_body
from .verify_rows import broken_columns

Counts = tuple[Int[np.ndarray, " id"], Int[np.ndarray, " id"]]


@dataclass(frozen=True, slots=True, eq=False)
class CheckedBlock:
    """What remains to be done or added up after a block was looked at."""

    n_objects: int
    n_bytes: int | None  # of its objects as recorded; None: the record cannot be relied on
    jobs: list[Job]
    tokens: Counts | None = None  # ids of the block, and how often each stands in it
    sequences: tuple[int, int] | None = None  # first and last number in the column


class BlockChecks:
    """Checks blocks of one store. `share`: part of the objects to read; 0 quick, 1 full."""

    def __init__(self, place: Place, ground: Ground, findings: Findings, share: float, seed: int) -> None:
        self.place, self.ground, self.findings = place, ground, findings
        self.share, self.seed = share, seed

    def check(self, block: int) -> CheckedBlock:
        record = self._record(block)
        plan = self.ground.plan
        rows = plan.block_range(block) if plan else (record.row0, record.row1) if record else None
        jobs = self._jobs(block, record, rows)
        there = self._look(block, jobs)
        self.findings.count(objects=len(jobs))
        n_bytes = sum(chunk.size for chunk in record.chunks.values()) if record else None
        if not self.share:
            return CheckedBlock(len(jobs), n_bytes, [])
        columns = [job for job in there if job.name in TOKEN_COLUMNS]
        found = self._read_columns(block, columns)
        valid = found.get("valid")
        chosen = self._choose(block, [job for job in there if job.name not in TOKEN_COLUMNS])
        return CheckedBlock(
            len(jobs),
            n_bytes,
            [job.with_valid(valid) for job in chosen],
            np.unique(found["token_id"], return_counts=True) if "token_id" in found else None,
            (int(found["sequence"][0]), int(found["sequence"][-1])) if "sequence" in found else None,
        )

    def _record(self, block: int) -> BlockRecord | None:
        """The block's record, if it is there, whole, the one that was sealed, and of this block."""
        name, plan = record_name(block), self.ground.plan
        tokens = plan.block_range(block) if plan else None
        absent = "the block record is missing: nothing says what the chunk objects of these tokens must be"
        content = self.findings.fetch(name, absent, tokens)
        if content is None or not vouched(self.ground, self.findings, name, content, tokens):
            return None
        where = self.place.where(name)
        try:
            if plan is None:
                record = parse_record(parse_json(content, where), where)
            else:
                record = load_record(content, plan, self.ground.specs, block, where)
        except FormatError as error:
            self.findings.add("unreadable", name, reason(error, where), tokens=tokens)
            return None
        except DamageError as error:
            self.findings.add("metadata", name, reason(error, where), tokens=tokens)
            return None
        if (text := self._wrong_size(record)) is not None:
            self.findings.add("metadata", name, text, tokens=tokens)
        return record

    def _wrong_size(self, record: BlockRecord) -> str | None:
        """A size that the record states and its array cannot have."""
        attributes, specs = self.ground.attributes, self.ground.specs
        if attributes is None or attributes.storage.compressor is not None or not specs:
            return None
        names = chunk_keys(specs, record.block)
        for key, chunk in record.chunks.items():
            if chunk.size != (size := specs[names[key][0]].chunk_bytes + CRC_BYTES):
                return f"it gives {key} {chunk.size} bytes, the array's chunks have {size}"
        return None

    def _jobs(self, block: int, record: BlockRecord | None, rows: tuple[int, int] | None) -> list[Job]:
        """Every chunk object of the block, as far as it is known which there are."""
        specs, chunks = self.ground.specs, record.chunks if record else dict[str, ChunkRecord]()
        if not specs:
            named = {key: (key.split("/")[0], None) for key in chunks}
        else:
            named = chunk_keys(specs, block)
        return [
            Job(
                block,
                key,
                name,
                index,
                self.ground.layer(index),
                rows,
                specs.get(name),
                chunks.get(key),
                _statistics(record, name, index or 0),
                self.ground.again(block),
            )
            for key, (name, index) in named.items()
        ]

    def _look(self, block: int, jobs: list[Job]) -> list[Job]:
        """The objects that are there in the right size."""
        good: list[Job] = []
        absent: list[Job] = []
        for job in jobs:
            size = self._size(job.file)
            expected = self._expected_size(job)
            if size is None:
                absent.append(job)
            elif expected is not None and size != expected:
                job.add(self.findings, "size", f"the chunk object has {size} bytes, {expected} were recorded")
            else:
                good.append(job)
        if absent and self.ground.copying:
            names = shown((job.file for job in absent), 1)
            text = f"{len(absent)} of {len(jobs)} chunk objects of the block have not arrived ({names})"
            words = "; ".join(self.ground.copy_words)
            self.findings.add("incomplete", absent[0].file, f"{text}: {words}", tokens=absent[0].rows)
        else:
            for job in absent:
                job.add(self.findings, "missing", f"the chunk object is missing; {job.again}")
        return good

    def _size(self, file: str) -> int | None:
        """From the listing; what is not in it is looked for, since links and late listings hide files."""
        if self.ground.listing is not None and (size := self.ground.listing.get(file)) is not None:
            return size
        try:
            return self.place.size(file)
        except OSError as error:
            raise fault(self.place, file, error) from error

    def _expected_size(self, job: Job) -> int | None:
        if job.chunk is not None:
            return job.chunk.size
        attributes = self.ground.attributes
        plain = attributes is not None and attributes.storage.compressor is None
        return job.spec.chunk_bytes + CRC_BYTES if plain and job.spec is not None else None

    def _choose(self, block: int, jobs: list[Job]) -> list[Job]:
        """A share of the jobs, at least one; the same ones for the same seed."""
        if self.share >= 1 or not jobs:
            return jobs
        n_chosen = max(1, int(np.ceil(self.share * len(jobs))))
        places = np.random.default_rng([self.seed, block]).choice(len(jobs), n_chosen, replace=False)
        return [jobs[place] for place in sorted(places.tolist())]

    def _read_columns(self, block: int, jobs: list[Job]) -> dict[str, np.ndarray]:
        """The token columns that are what was committed; their promises are checked."""
        attributes, plan = self.ground.attributes, self.ground.plan
        found: dict[str, np.ndarray] = {}
        for job in jobs:
            body = read_body(self.place, self.ground, self.findings, job)
            if body is not None and job.spec is not None and plan is not None:
                found[job.name] = body.view(job.spec.dtype)[: int(plan.block_rows[block])]
        if plan is not None and attributes is not None:
            row0 = plan.block_range(block)[0]
            by_name = {job.name: job for job in jobs}
            for broken in broken_columns(found, plan, attributes, block):
                row = row0 + broken.row
                by_name[broken.column].add(
                    self.findings, "values", f"token {row}: {broken.text}", (row, row + 1)
                )
        return found


def _statistics(record: BlockRecord | None, site: str, index: int) -> dict[str, float | int | None]:
    """The statistics of one object, as far as the record has them."""
    named = record.statistics.get(site, {}) if record else {}
    return {name: values[index] for name, values in named.items() if index < len(values)}
