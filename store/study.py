"""A study folder: the results over one or more stores of one model, and how each came to be.

In: tables, surrogates, needs, and for each step its inputs, settings and outputs. Out: Parquet and Zarr
files of fixed form, and provenance.json, by which a step knows that nothing has changed. Every file has one
owner (a step); the same results give the same bytes, so times and hosts go to runs/ and never into a table.
What is read is checked like a store: a study may come from elsewhere too.
"""

import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from . import durable
from .errors import NearlineError
from .finding import is_study, no_study
from .names import printable
from .parsing import readable
from .places import scheme_of
from .records import check_key
from .study_files import PROVENANCE, SETTINGS, read_settings, read_steps, read_stores, shown_place
from .study_layout import StudyLayout
from .tables import column_names, read_table, write_table
from .toml import toml_bytes
from .whole import digest_of, open_arrays, write_arrays

if TYPE_CHECKING:
    import xarray as xr


class Study(StudyLayout):
    """Handle on a study folder; `create` begins one, `open` continues one."""

    def __repr__(self) -> str:
        try:
            steps = ", ".join(printable(name) for name in self.provenance()) or "not fitted yet"
        except (NearlineError, OSError):  # a repr must not raise
            steps = f"{PROVENANCE} cannot be read"
        return f"Study({str(self.path)!r}: {steps})"

    @classmethod
    def create(cls, path: str | Path) -> "Study":
        """Begin a study in a new or empty folder; one that exists is opened."""
        if is_study(Path(path)):
            return cls.open(path)
        folder = durable.claim_folder(Path(path))
        durable.write_file(folder / PROVENANCE, readable({"schema": 1, "steps": {}}))
        durable.write_file(folder / SETTINGS, toml_bytes({"stores": {}, "settings": {}}))
        return cls(folder)

    @classmethod
    def open(cls, path: str | Path) -> "Study":
        folder = Path(path)
        if not is_study(folder):
            raise no_study(folder)
        return cls(folder)

    # Settings and stores

    def write_settings(self, stores: Mapping[str, str | Path], settings: Mapping[str, Any]) -> None:
        """study.toml: resolved settings, and where each store is (relative to the study where possible)."""
        shown = {name: shown_place(path, self.path) for name, path in sorted(stores.items())}
        durable.write_file(self.path / SETTINGS, toml_bytes({"stores": shown, "settings": dict(settings)}))

    def settings(self) -> dict[str, Any]:
        return read_settings(self.path)

    def stores(self) -> dict[str, str | Path]:
        """Where the stores are, by name: resolved paths, or URLs."""
        found = read_stores(self.path)
        return {name: self.path / path if scheme_of(path) is None else path for name, path in found.items()}

    # Tables

    def write_table(self, name: str, table: pa.Table) -> str:
        """Write a result table; returns its path inside the study, as `record_step` wants it."""
        return self._write(self.table_path(name), table)

    def table(self, name: str) -> pa.Table:
        return self._read(self.table_path(name))

    def has_table(self, name: str) -> bool:
        return self._found(self.table_path(name)).exists()

    def tables(self) -> list[str]:
        """Names of the tables that are there."""
        return sorted(path.stem for path in (self.path / "tables").glob("*.parquet"))

    # Tokens

    def write_rows(self, store: str, table: pa.Table) -> str:
        """Identity of the rows of a store, one per token row."""
        return self._write(self.rows_path(store), table)

    def write_need(
        self,
        layer: int,
        store: str,
        table: pa.Table,
        *,
        surrogate: str | None = None,
        step: str | None = None,
    ) -> str:
        """Needs of a layer in a store, row for row as `rows`."""
        return self._write(self.need_path(layer, store, surrogate=surrogate, step=step), table)

    def write_routing(self, layer: int, need: str, store: str, table: pa.Table) -> str:
        """What gates say of the rows of a store: `token`, and a column of p(linear) for each gate."""
        return self._write(self.routing_path(layer, need, store), table)

    def rows(self, store: str) -> pa.Table:
        return self._read(self.rows_path(store))

    def need(
        self, layer: int, store: str, *, surrogate: str | None = None, step: str | None = None
    ) -> pa.Table:
        return self._read(self.need_path(layer, store, surrogate=surrogate, step=step))

    def routing(self, layer: int, need: str, store: str) -> pa.Table:
        return self._read(self.routing_path(layer, need, store))

    # Surrogates

    def write_surrogates(
        self, arrays: Mapping[str, Any], attrs: Mapping[str, Any], name: str | None = None
    ) -> str:
        """surrogates.zarr (or surrogates@NAME.zarr): arrays by name, each an array or (dims, array)."""
        return self._write_arrays(self.surrogates_path(name), arrays, attrs)

    def surrogates(self, name: str | None = None) -> "xr.Dataset":
        """The surrogates, lazily; a missing or damaged chunk raises."""
        return open_arrays(self._found(self.surrogates_path(name)))

    # Other arrays

    def write_group(self, name: str, arrays: Mapping[str, Any], attrs: Mapping[str, Any]) -> str:
        """NAME.zarr (gates, context, moments@STORE): arrays by name, each (dims, array)."""
        return self._write_arrays(self.group_path(name), arrays, attrs)

    def group(self, name: str) -> "xr.Dataset":
        """NAME.zarr, lazily; a missing or damaged chunk raises."""
        return open_arrays(self._found(self.group_path(name)))

    # Provenance

    def record_step(
        self,
        name: str,
        *,
        inputs: Mapping[str, str],
        settings: Mapping[str, Any],
        outputs: list[str],
        facts: Mapping[str, Any],
    ) -> None:
        """Note what a step read (digests), how, and what it wrote; the outputs' digests are taken here.

        `facts` must follow from the inputs; times and hosts belong to `write_run`.
        """
        digests = {check_key(output, "outputs"): digest_of(self.path / output) for output in sorted(outputs)}
        step = {"inputs": dict(inputs), "settings": dict(settings), "outputs": digests, "facts": dict(facts)}
        steps = self.provenance()
        steps[name] = step
        durable.write_file(self.path / PROVENANCE, readable({"schema": 1, "steps": steps}))

    def drop_step(self, name: str) -> None:
        """Remove the files that a step wrote, and its record: what it was made from is there no longer."""
        steps = self.provenance()
        for output in steps.pop(name)["outputs"]:
            self.remove_output(output)
        durable.write_file(self.path / PROVENANCE, readable({"schema": 1, "steps": steps}))

    def remove_output(self, output: str) -> None:
        """Remove a file or a group that a step wrote, and the folders that it leaves empty."""
        path = self.path / check_key(output, "outputs")
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        for folder in path.parents:
            if folder == self.path or not folder.is_dir() or any(folder.iterdir()):
                break
            folder.rmdir()

    def discard_unused(self) -> None:
        """Empty the folder again if nothing was written after `create`; else nothing is touched."""
        first = {SETTINGS, PROVENANCE}
        if {entry.name for entry in self.path.iterdir()} <= first and not self.provenance():
            for name in first:
                (self.path / name).unlink(missing_ok=True)

    def step_is_current(self, name: str, inputs: Mapping[str, str], settings: Mapping[str, Any]) -> bool:
        """The step was recorded with these inputs and settings, and its outputs are still what it wrote."""
        step = self.provenance().get(name)
        if step is None or step["inputs"] != dict(inputs):
            return False
        if readable(step["settings"]) != readable(dict(settings)):
            return False
        return all(
            (self.path / output).exists() and digest_of(self.path / output) == digest
            for output, digest in step["outputs"].items()
        )

    def provenance(self) -> dict[str, dict[str, Any]]:
        """Recorded steps by name: inputs, settings, outputs with digests, facts."""
        return read_steps(self.path)

    def write_run(self, facts: Mapping[str, Any]) -> Path:
        """Facts that differ from run to run (times, host, command): runs/<id>.json."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        target = self.path / "runs" / f"{stamp}-{secrets.token_hex(4)}.json"
        durable.write_file(target, readable(dict(facts)))
        return target

    def need_names(
        self, layer: int, store: str, *, surrogate: str | None = None, step: str | None = None
    ) -> list[str]:
        """The columns of `need`, without reading them."""
        return column_names(self._found(self.need_path(layer, store, surrogate=surrogate, step=step)))

    # Where results are written to and found: `StagedStudy` has others

    def _read(self, path: Path) -> pa.Table:
        return read_table(self._found(path))

    def _write(self, path: Path, table: pa.Table) -> str:
        write_table(self._target(path), table)
        return path.relative_to(self.path).as_posix()

    def _write_arrays(self, path: Path, arrays: Mapping[str, Any], attrs: Mapping[str, Any]) -> str:
        write_arrays(self._target(path), arrays, attrs)
        return path.name

    def _target(self, path: Path) -> Path:
        return path

    def _found(self, path: Path) -> Path:
        return path
