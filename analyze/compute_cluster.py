"""Dask clusters: settings in, workers of this machine, behind an address or of Slurm out.

This process starts tasks, at most one more than there are workers, and gathers the results of the last ones;
see `compute_place`. A cluster of this machine listens on 127.0.0.1 alone, and its processes are deaf to an
interrupt of the terminal: this process hears it and stops them. Cost: a second or two to start a worker.
"""

import logging
import pickle
import signal
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

import dask.config
from blake3 import blake3

from ..store import EnvironmentFault
from .compute_settings import ComputeSettings
from .compute_tasks import Workers

try:
    from distributed import Client, LocalCluster
except ImportError:
    raise EnvironmentFault(
        "workers outside this process need the package distributed: pip install 'nearline[cluster]', or "
        "leave `scheduler` out to compute on threads"
    ) from None

from .compute_place import WORKERS_S, ClusterPlace, Watch, no_workers, short
from .compute_worker import SharedValue

# How long a scheduler may take to answer: a busy one takes many seconds, and a wrong address is worth a wait.
CONNECT_S: Final = 20
# A task that was at work on this many workers when they died is not tried again.
ALLOWED_DEATHS: Final = 3
# What Python and its libraries take in a worker process, beside the working memory that the settings bound.
PROCESS_BYTES: Final = 512 * 2**20
# Where these differ from ours, numbers may: they are named in a warning.
COMPARED: Final = ("numpy", "scipy")
_LOG = logging.getLogger("nearline")


class Cluster(Workers):
    """A client of a Dask scheduler, with what must be closed after it; made by `open_cluster`."""

    def __init__(self, client: Client, settings: ComputeSettings) -> None:
        self._client, self._settings = client, settings
        self._closing = ExitStack()
        self.external = settings.scheduler not in ("local", "slurm")
        threads = _n_threads(client)
        self.n_workers = min(threads, settings.workers or threads) if self.external else settings.n_workers
        self.watch = Watch(client, settings)

    @property
    def worker_bytes(self) -> int | None:
        """Working memory of a worker: of one that we started by the settings, of others what they say."""
        if not self.external:
            return self._settings.worker_bytes
        info: Any = self._client.scheduler_info(n_workers=-1)
        workers = info["workers"].values()
        limits = [one["memory_limit"] // one["nthreads"] for one in workers if one["memory_limit"]]
        return max(1, min(limits) - PROCESS_BYTES) if limits else None

    @contextmanager
    def place(self, shared: Any, stage: str, workers: int | None) -> Generator[ClusterPlace, None, None]:
        content = pickle.dumps(shared, protocol=5)
        plugin = SharedValue(blake3(content).hexdigest()[:32], content)
        limit = self.n_workers + 1 if workers is None else min(workers, self.n_workers + 1)
        place = ClusterPlace(self._client, self.watch, self._settings.scheduler, plugin.digest, stage, limit)
        self._client.register_plugin(plugin)
        try:
            yield place
        finally:
            place.forget()
            with suppress(Exception):  # the scheduler may be gone, and that was said
                self._client.unregister_worker_plugin(plugin.name)

    def close_with(self, closing: ExitStack) -> None:
        """Take over what is to be closed at the end."""
        self._closing = closing.pop_all()

    def close(self) -> None:
        with suppress(Exception):  # the scheduler may be gone, and that was said
            self._client.unsubscribe_topic(
                "all"
            )  # or it would be told of its own end, and log that it was not
        self._closing.close()


def open_cluster(settings: ComputeSettings) -> Cluster:
    """Start the workers that the settings name, or connect to them."""
    with ExitStack() as closing:
        closing.enter_context(
            dask.config.set(
                {
                    "distributed.scheduler.allowed-failures": ALLOWED_DEATHS,
                    "distributed.admin.large-graph-warning-threshold": "1 TiB",
                    "distributed.worker.profile.enabled": False,
                }
            )
        )
        if settings.scheduler == "local":
            client = _local(settings, closing)
        elif settings.scheduler == "slurm":
            from .compute_slurm import slurm_cluster

            client = _client_of(closing.enter_context(slurm_cluster(settings)), closing)
        else:
            client = _connected(settings.scheduler, closing)
        if link := client.dashboard_link:
            _LOG.info("compute: %s; dashboard at %s", settings.scheduler, link)
        cluster = Cluster(client, settings)
        cluster.close_with(closing)
        return cluster


def _local(settings: ComputeSettings, closing: ExitStack) -> Client:
    scratch = closing.enter_context(tempfile.TemporaryDirectory(prefix="nearline-workers-"))
    with _interrupts_held():
        cluster: Any = LocalCluster(
            n_workers=settings.n_workers,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            memory_limit=settings.worker_bytes + PROCESS_BYTES,
            local_directory=scratch,
            silence_logs=logging.CRITICAL,
        )
        closing.enter_context(cluster)
    return _client_of(cluster, closing)


@contextmanager
def _interrupts_held() -> Generator[None, None, None]:
    """An interrupt waits until the block is done. Threads started in it, and the processes that these start,
    never get one: a terminal interrupts all processes, and workers would each print a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _client_of(cluster: Any, closing: ExitStack) -> Client:
    return closing.enter_context(Client(cluster, set_as_default=False))


def _connected(address: str, closing: ExitStack) -> Client:
    """A client of a scheduler that runs already, with workers that have what we have."""
    try:
        client = closing.enter_context(Client(address, timeout=CONNECT_S, set_as_default=False))
    except (OSError, ValueError, TypeError) as error:  # nobody there; or TLS files that are none
        raise EnvironmentFault(
            f"scheduler={address}: no Dask scheduler answers there within {CONNECT_S} s ({short(error)}): "
            f"start one with `dask scheduler` and workers with `dask worker {address}`, or leave `scheduler` "
            "out to compute on threads"
        ) from None
    try:
        client.wait_for_workers(1, timeout=WORKERS_S)
    except TimeoutError:
        raise EnvironmentFault(no_workers(address)) from None
    _check_versions(client, address)
    return client


def _n_threads(client: Client) -> int:
    found: Any = client.nthreads()
    return sum(found.values())


def _check_versions(client: Client, address: str) -> None:
    found: Any = client.get_versions(packages=["nearline", *COMPARED])
    ours = found["client"]["packages"]
    others = {"the scheduler": found["scheduler"], **dict(found["workers"])}
    for where, versions in others.items():
        theirs = versions["packages"]
        if theirs.get("nearline") != ours["nearline"]:
            raise EnvironmentFault(
                f"scheduler={address}: {where} has nearline {theirs.get('nearline') or 'not installed'}, "
                f"this process {ours['nearline']}: install the same one there"
            )
        if other := [name for name in COMPARED if theirs.get(name) != ours[name]]:
            spelt = ", ".join(f"{name} {theirs.get(name)} and not {ours[name]}" for name in other)
            _LOG.warning("compute: %s has %s: results may differ in the last digits", where, spelt)
