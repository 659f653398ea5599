"""Several processes that train one model together: each takes its share of every step's passes.

In: the environment that torchrun (or `accelerate launch`) sets. Out: who leads, who waits. All processes
train and score the same; the leader alone writes. A step has the windows that it has with one process, so
that results differ by rounding only, and in a model with dropout by its draws: every process has the same
seed. Cost: one process group, a barrier a course.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from accelerate import PartialState

from ..store.errors import UsageError
from .ranks import ranks_of
from .settings import HarvestSettings
from .tuning_settings import FinetuneSettings


@dataclass(frozen=True, slots=True)
class Processes:
    """This process and how many there are."""

    rank: int = 0
    n: int = 1

    @property
    def leads(self) -> bool:
        """Whether it is the one that writes."""
        return self.rank == 0

    def wait(self) -> None:
        """Until all are here: what the leader wrote before is there for everyone."""
        if self.n > 1:
            torch.distributed.barrier()


def processes_of(settings: FinetuneSettings, environment: Mapping[str, str] | None = None) -> Processes:
    """Those of torchrun's environment; alone without it. Joins the group of several."""
    found = ranks_of(HarvestSettings(), os.environ if environment is None else environment)
    if found.world_size == 1:
        return Processes()
    if settings.accumulate % found.world_size:
        raise UsageError(
            f"accumulate={settings.accumulate}: {found.world_size} processes share the passes of a step, and "
            f"each needs as many: name a multiple, such as {found.world_size}"
        )
    if not torch.distributed.is_initialized():
        PartialState(cpu=settings.device == "cpu" or not torch.cuda.is_available())
    return Processes(found.rank, found.world_size)
