"""What a fine-tuning experiment has done so far, kept aside in the study, so that one that stopped goes on.

In: scores of points, trained weights. Out: what is there already, as long as it was made with the same
stores, surrogates, settings, model and arithmetic; anything else is removed. Cost: a small table a course;
the weights of a first phase that others start from, and one checkpoint of the course at work.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from torch import Tensor

from ..store import durable
from ..store.errors import NearlineError
from ..store.parsing import parse_json, readable
from ..store.tables import read_table, write_table
from .tuned_scores import Score
from .tuned_weights import save_weights
from .tuning_processes import Processes

ASIDE: Final = ".finetune.partial"
LOCK: Final = ".finetune.lock"
_KEY: Final = "key.json"

SCORES: Final = pa.schema(
    [
        ("step", pa.int64()),
        ("store", pa.string()),
        ("split", pa.string()),
        ("group", pa.int64()),
        ("n_tokens", pa.int64()),
        ("nll", pa.float64()),
    ]
)
GATES: Final = pa.schema(
    [
        ("step", pa.int64()),
        ("store", pa.string()),
        ("split", pa.string()),
        ("layer", pa.int64()),
        ("mean_gate", pa.float64()),
        ("share_linear", pa.float64()),
    ]
)


@dataclass(frozen=True, slots=True)
class Name:
    """One course of one seed and learning rate; `after` is the rate of the course it starts from."""

    course: str
    seed: int
    learning_rate: float
    after: float | None = None

    @property
    def folder(self) -> str:
        start = "" if self.after is None else f" after {self.after:g}"
        return f"{self.course}, seed {self.seed}, rate {self.learning_rate:g}{start}"


class TuningPieces:
    """The folder of one experiment at work."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self._folder, self._processes = folder, processes

    @classmethod
    def open(cls, study: Path, key: Mapping[str, Any], processes: Processes) -> "TuningPieces":
        """Those of an earlier run that was asked for the same; all others are removed. Of several processes
        the leader alone writes.
        """
        folder = study / ASIDE
        try:
            before = parse_json((folder / _KEY).read_bytes(), str(folder / _KEY))
        except (OSError, NearlineError):
            before = None
        if processes.leads and before != parse_json(readable(dict(key)), "key"):
            shutil.rmtree(folder, ignore_errors=True)
            durable.write_file(folder / _KEY, readable(dict(key)))
        processes.wait()
        return cls(folder, processes)

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def wait(self) -> None:
        """Until what the leader has kept so far is there for every process."""
        self._processes.wait()

    @property
    def n_processes(self) -> int:
        return self._processes.n

    def scores(self, name: Name) -> pa.Table:
        """The scores of a course that is done, or as far as it came."""
        return _table(self._path(name) / "scores.parquet", SCORES)

    def gates(self, name: Name) -> pa.Table:
        return _table(self._path(name) / "gates.parquet", GATES)

    def add(self, name: Name, step: int, found: Sequence[Score]) -> None:
        """The scores after a step; those of this step and later ones, of a run that went further, go."""
        if not self._processes.leads:
            return
        folder = self._path(name)
        sums, gates = _rows(step, found)
        for path, rows, schema in (("gates.parquet", gates, GATES), ("scores.parquet", sums, SCORES)):
            before = [row for row in _table(folder / path, schema).to_pylist() if row["step"] < step]
            write_table(folder / path, pa.Table.from_pylist([*before, *rows], schema))

    def is_done(self, name: Name) -> bool:
        return (self._path(name) / "done").exists()

    def finish(self, name: Name) -> None:
        """Everything of this course is kept; its checkpoints are not needed any more."""
        if not self._processes.leads:
            return
        durable.write_file(self._path(name) / "done")
        shutil.rmtree(self.checkpoints(name), ignore_errors=True)

    def checkpoints(self, name: Name) -> Path:
        return self._path(name) / "checkpoints"

    def keep_weights(self, weights: Mapping[str, Tensor], name: Name, step: int | str) -> None:
        if self._processes.leads:
            save_weights(weights, self.weights(name, step))

    def weights(self, name: Name, step: int | str) -> Path:
        """Where the weights that learned are kept."""
        return self._path(name) / f"weights {step}.safetensors"

    def _path(self, name: Name) -> Path:
        return self._folder / name.folder


def _rows(step: int, found: Sequence[Score]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    sums, gates = [], []
    for one in found:
        where = {"step": step, "store": one.rows.store, "split": one.rows.split}
        values = zip(one.rows.groups.tolist(), one.rows.n_tokens.tolist(), one.nll.tolist(), strict=True)
        sums += [where | {"group": group, "n_tokens": n, "nll": nll} for group, n, nll in values]
        gates += [
            where | {"layer": layer, "mean_gate": mean, "share_linear": share}
            for layer, (mean, share) in sorted(one.gates.items())
        ]
    return sums, gates


def _table(path: Path, schema: pa.Schema) -> pa.Table:
    return read_table(path, schema) if path.exists() else schema.empty_table()
