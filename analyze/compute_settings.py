"""Where and with how much an analysis computes: fields that change how fast a result comes, never the result.

In: keyword arguments, a TOML table (flat, or under `[compute]`) or flags of the same names. Out: the base
that the settings of `fit` and of `analyze` share.
"""

import os
import re
from collections.abc import Mapping
from typing import Any, Final

import pydantic
from pydantic import Field

from ..store.errors import UsageError
from ..store.settings import parse_bytes

# What a table `[compute]` in a settings file calls the fields; the prefix is for flags, where no table says
# it.
IN_TABLE: Final = {
    name: name if name in ("scheduler", "workers") else f"slurm_{name}"
    for name in "scheduler workers queue account walltime cores memory interface directives".split()
} | {"memory_limit": "memory_limit"}
_ADDRESS = re.compile(r"(tcp|tls)://[^\s/@]+:\d{1,5}/?")
_WALLTIME = re.compile(r"(\d+-)?\d+(:\d{1,2}){0,2}")


class ComputeSettings(pydantic.BaseModel):
    """The part of the settings that says where the work runs."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    workers: int | None = Field(
        default=None,
        ge=1,
        description="Threads or worker processes; by default as many as the process may use, all that a "
        "scheduler has, or those of one Slurm job.",
    )
    memory_limit: str = Field(
        default="4 GiB", description="Bound of the working memory of all workers of this machine together."
    )
    scheduler: str = Field(
        default="threads",
        description="threads, local (processes of this machine), slurm, or the address of a Dask scheduler "
        "such as tcp://host:8786.",
    )
    slurm_queue: str | None = Field(default=None, description="Partition of the Slurm jobs.")
    slurm_account: str | None = Field(default=None, description="Account that the Slurm jobs are charged to.")
    slurm_walltime: str = Field(default="01:00:00", description="Time limit of a Slurm job.")
    slurm_cores: int = Field(default=1, ge=1, description="Cores of a Slurm job: one worker each.")
    slurm_memory: str = Field(default="4 GiB", description="Memory of a Slurm job.")
    slurm_interface: str | None = Field(
        default=None, description="Network interface between the Slurm jobs and this machine, such as ib0."
    )
    slurm_directives: tuple[str, ...] = Field(
        default=(), description="More #SBATCH options, such as --constraint=cpu."
    )

    @pydantic.field_validator("memory_limit", "slurm_memory")
    @classmethod
    def _check_memory(cls, limit: str) -> str:
        parse_bytes(limit)
        return limit

    @pydantic.field_validator("scheduler")
    @classmethod
    def _check_scheduler(cls, scheduler: str) -> str:
        if scheduler not in ("threads", "local", "slurm") and not _ADDRESS.fullmatch(scheduler):
            raise ValueError("must be threads, local, slurm or an address such as tcp://host:8786")
        return scheduler

    @pydantic.field_validator("slurm_walltime")
    @classmethod
    def _check_walltime(cls, walltime: str) -> str:
        if not _WALLTIME.fullmatch(walltime):
            raise ValueError("must be a time of Slurm's such as 02:00:00 or 1-12:00:00")
        return walltime

    @pydantic.field_validator("slurm_directives", mode="before")
    @classmethod
    def _split_directives(cls, values: object) -> object:
        """One line each in a file; on the command line split before each `--`, since values hold commas."""
        if isinstance(values, str):
            return [part for part in re.split(r",\s*(?=-)", values.strip()) if part]
        return values

    @pydantic.field_validator("slurm_queue", "slurm_account", "slurm_interface", "slurm_directives")
    @classmethod
    def _one_line(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        """They become lines of a job script."""
        for one in (value,) if isinstance(value, str) else value or ():
            if not one.strip() or not one.isprintable():
                raise ValueError("must be one line of text")
        return value

    @property
    def n_workers(self) -> int:
        """How many workers to start: of a scheduler that runs already, the session knows."""
        if self.workers is not None:
            return self.workers
        if self.scheduler == "slurm":
            return self.slurm_cores
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    @property
    def memory_limit_bytes(self) -> int:
        return parse_bytes(self.memory_limit)

    @property
    def worker_bytes(self) -> int:
        """Working memory of one worker that this process starts."""
        if self.scheduler == "slurm":
            return parse_bytes(self.slurm_memory) // self.slurm_cores
        return self.memory_limit_bytes // self.n_workers


MACHINE_FIELDS: Final = frozenset(ComputeSettings.model_fields)


def flatten_compute(data: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a file holds them, with what stands in a table `[compute]` under the names of the
    fields.
    """
    flat = {key: value for key, value in data.items() if key != "compute"}
    table = data.get("compute", {})
    if not isinstance(table, Mapping):
        raise UsageError(f"compute = {table!r}: it is a table, [compute], with {', '.join(sorted(IN_TABLE))}")
    for key, value in table.items():
        name = IN_TABLE.get(key, key if key in MACHINE_FIELDS else None)
        if name is None:
            raise UsageError(f"[compute] has no setting {key!r}; it has {', '.join(sorted(IN_TABLE))}")
        if name in flat:
            raise UsageError(f"{name} stands in the settings and in [compute] as {key}: give it once")
        flat[name] = value
    return flat
