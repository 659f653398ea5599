"""Dask workers as Slurm jobs, through dask-jobqueue: settings in, a cluster that asks for its jobs out.

The scheduler runs in this process, so that jobs must reach this machine: `slurm_interface` names the
network between them. Each core of a job is one worker of one thread. Jobs that end at their time limit are
lost workers: their items run again on the others. Cost: the time that jobs wait in their queue.
"""

import math
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from ..store import EnvironmentFault
from .compute_settings import ComputeSettings


@contextmanager
def slurm_cluster(settings: ComputeSettings) -> Generator[Any, None, None]:
    """A cluster with its jobs asked for; they are cancelled at the end."""
    try:
        from dask_jobqueue import SLURMCluster
        from distributed.core import Status
    except ImportError:
        raise EnvironmentFault(
            "scheduler=slurm needs the package dask-jobqueue: pip install 'nearline[cluster]'"
        ) from None
    if shutil.which("sbatch") is None:
        raise EnvironmentFault(
            "scheduler=slurm: there is no `sbatch` here: start this on a machine that may submit Slurm jobs, "
            "or use scheduler=local"
        )
    made: Any = SLURMCluster(**job_options(settings))
    with made as cluster:
        try:
            # As `scale` does, which does not say what became of it.
            for _ in range(math.ceil(settings.n_workers / settings.slurm_cores)):
                cluster.worker_spec.update(cluster.new_worker_spec())
            cluster.sync(cluster._correct_state)
        except (RuntimeError, OSError) as error:
            for job in cluster._created:  # closing waits for jobs that are neither running nor failed
                job.status = Status.failed
            raise EnvironmentFault(f"scheduler=slurm: {_refusal(error)}: see the settings slurm_…") from None
        yield cluster


def job_options(settings: ComputeSettings) -> dict[str, Any]:
    """What the settings say, in the words of dask-jobqueue."""
    return {
        "queue": settings.slurm_queue,
        "account": settings.slurm_account,
        "walltime": settings.slurm_walltime,
        "cores": settings.slurm_cores,
        "processes": settings.slurm_cores,
        "memory": settings.slurm_memory,
        "interface": settings.slurm_interface,
        "job_extra_directives": list(settings.slurm_directives),
        "job_name": "nearline",
        "scheduler_options": {"dashboard_address": "127.0.0.1:0"},
    }


def _refusal(error: BaseException) -> str:
    """The first line that sbatch wrote to its standard error."""
    lines = [line.strip() for line in str(error).partition("stderr:")[2].splitlines() if line.strip()]
    return f"sbatch says: {lines[0][:200]}" if lines else f"no job could be submitted ({str(error)[:200]})"
