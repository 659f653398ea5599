"""Harvests in processes of their own, by the dozen: killed, signalled, paused or left alone.

In: tasks, plain dictionaries (see `Forge.run`). Out: how each process ended, what it said, which named crash
points it passed. One template process imports everything once and then forks a child per task, so that a run
costs a third of a second of CPU instead of five. Forking beside threads can hang a child, so the template has
none: it only imports, no torch operation runs in it, and it refuses to fork when the kernel counts a second
thread.

    outcome = the_forge().run(path=str(store), kill_at=("writer.chunks_durable", 3))
    first, second = the_forge().run_all([{"path": ..., "settings": {"rank": 0, "world_size": 2}}, ...])
"""

import atexit
import functools
import gc
import importlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers_harvest import files_of

ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
ONE_THREAD["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow's allocator starts one on import
SETTINGS: dict[str, Any] = {
    "tokens": 240,
    "sequence_length": 24,
    "min_length": 4,
    "batch_tokens": 48,
    "block": 40,
    "threads": 1,
    "storage_dtype": "float32",
}
N_BLOCKS = 6
# Whatever a harvest imports, also late (pyarrow imports pandas when it makes an array): no child pays for it.
IMPORTS = (
    "nearline.collect.harvesting",
    "nearline.store.sealing",
    "pandas",
    "pyarrow.parquet",
    "transformers.models.llama.modeling_llama",
)


def store_files(path: Path) -> dict[str, bytes]:
    """Everything under the seal, and the seal."""
    return files_of(path, without=("runs", "README.md"))


@dataclass(frozen=True)
class Outcome:
    """`code`: the exit code, minus the signal's number where one ended the process."""

    code: int
    message: str = ""
    notes: tuple[str, ...] = ()
    points: dict[str, int] = field(default_factory=dict)
    seconds_after_record: float = 0.0

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


class Forge:
    """The test's side of the template process."""

    def __init__(self) -> None:
        self._template = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ONE_THREAD, "TOKENIZERS_PARALLELISM": "false"},
        )

    def close(self) -> None:
        assert self._template.stdin
        assert self._template.stdout
        self._template.stdin.close()
        self._template.wait()
        self._template.stdout.close()

    def run(self, **task: Any) -> Outcome:
        """One harvest, into `path`. `settings` go over SETTINGS; `dtype` is the model's. `kill_at`: a point
        and at which of its visits; `kill_after_s`: so long after the first record, by `kill_with` if it is
        not to be SIGKILL; `signals`: {point or "batch": [visit, number, ...]}, sent by the process to itself;
        `handlers`: as on the command line."""
        return self.run_all([task])[0]

    def run_all(self, tasks: list[dict[str, Any]]) -> list[Outcome]:
        """Several harvests at once."""
        assert self._template.stdin
        assert self._template.stdout
        self._template.stdin.write(json.dumps(tasks).encode() + b"\n")
        self._template.stdin.flush()
        line = self._template.stdout.readline()
        assert line, "the template process ended"
        return [Outcome(**{**one, "notes": tuple(one.get("notes", ()))}) for one in json.loads(line)]


@functools.cache
def the_forge() -> Forge:
    """One for all tests of this process."""
    forge = Forge()
    atexit.register(forge.close)
    return forge


# ---- the template's side


def main() -> None:
    """Read a line of tasks, fork, wait for all, answer with a line; until the input ends."""
    sys.path.insert(0, str(Path(__file__).parent))
    for name in IMPORTS:
        importlib.import_module(name)
    os.environ["HF_HUB_OFFLINE"] = "1"
    gc.collect()
    gc.freeze()  # or each child's collector would touch, and so copy, all that was imported
    for line in sys.stdin.buffer:
        n_threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - no Path of it is wanted
        assert n_threads == 1, f"forking beside {n_threads - 1} other threads"
        answers = _run_all(json.loads(line))
        sys.stdout.write(json.dumps(answers) + "\n")
        sys.stdout.flush()


def _run_all(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fork a child per task; the child's pipe brings "record" lines and, at the end, its answer."""
    selector = selectors.DefaultSelector()
    pids, said = [], [b""] * len(tasks)
    for number, task in enumerate(tasks):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _child(task, writing)
        os.close(writing)
        pids.append(pid)
        selector.register(reading, selectors.EVENT_READ, number)
    due: dict[int, float] = {}
    while selector.get_map():
        wait_s = max(min(due.values()) - time.monotonic(), 0) if due else None
        for key, _ in selector.select(wait_s):
            piece = os.read(key.fd, 65536)
            said[key.data] += piece
            if not piece:
                selector.unregister(key.fd)
                os.close(key.fd)
                due.pop(key.data, None)
            elif b"record\n" in piece and tasks[key.data].get("kill_after_s") is not None:
                due[key.data] = time.monotonic() + tasks[key.data]["kill_after_s"]
        for number in [number for number, when in due.items() if when <= time.monotonic()]:
            os.kill(pids[number], tasks[number].get("kill_with", signal.SIGKILL))
            del due[number]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    last = [text.replace(b"record\n", b"") for text in said]
    return [
        {"code": code, **(json.loads(text) if text else {})} for code, text in zip(codes, last, strict=True)
    ]


def _child(task: dict[str, Any], pipe: int) -> None:
    """Harvest, say how it went, end without going back into the template's code."""
    os.close(0)
    code, answer = 99, {}
    try:
        code, answer = _harvest(task, pipe)
    except BaseException as error:  # a test must see it, whatever it is
        answer = {"message": f"{type(error).__name__}: {error}"}
    finally:
        os.write(pipe, json.dumps(answer).encode())
        os._exit(code)


def _harvest(task: dict[str, Any], pipe: int) -> tuple[int, dict[str, Any]]:
    import torch
    from helpers_harvest import texts
    from helpers_models import tiny_model, tiny_tokenizer
    from nearline.collect.harvesting import harvest
    from nearline.collect.stopping import StopRequest, stop_on_signals
    from nearline.store import points
    from nearline.store.errors import NearlineError

    torch.set_num_threads(1)
    script, notes = _Script(task, pipe), _Notes()
    points.hook = script.reached
    logging.getLogger("nearline").addHandler(notes)
    logging.getLogger("nearline").setLevel(logging.INFO)
    model, _ = tiny_model("llama", dtype=getattr(torch, task.get("dtype", "float32")))
    settings = {**SETTINGS, **task.get("settings", {})}

    def run(stop: StopRequest | None) -> None:
        harvest(
            model, tiny_tokenizer(), texts(), task["path"], progress=script.progress, stop=stop, **settings
        )

    code, message = 0, ""
    try:
        if not task.get("handlers"):
            signal.signal(signal.SIGINT, signal.default_int_handler)
            run(None)
        else:
            with stop_on_signals() as stop:
                run(stop)
    except NearlineError as error:
        code, message = error.exit_code, str(error)
    facts = {"points": script.counts, "seconds_after_record": script.since_record()}
    return code, {"message": message, "notes": notes.texts, **facts}


class _Notes(logging.Handler):
    """What the run says."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class _Script:
    """What a task wants to happen at which point."""

    def __init__(self, task: dict[str, Any], pipe: int) -> None:
        self.counts: Counter[str] = Counter()
        self._pipe = pipe
        self._kill_at = task.get("kill_at")
        self._signals: dict[str, list[int]] = task.get("signals", {})
        self._record_s: float | None = None

    def reached(self, point: str) -> None:
        self.counts[point] += 1
        if self._kill_at is not None and [point, self.counts[point]] == list(self._kill_at):
            os.kill(os.getpid(), signal.SIGKILL)
        if point == "writer.record_created" and self._record_s is None:
            self._record_s = time.monotonic()
            os.write(self._pipe, b"record\n")
        nth, *numbers = self._signals.get(point, [0])
        if self.counts[point] == nth:
            for number in numbers:
                os.kill(os.getpid(), number)

    def progress(self, stage: str, done: int, total: int, unit: str) -> None:
        self.reached("batch")

    def since_record(self) -> float:
        return 0.0 if self._record_s is None else time.monotonic() - self._record_s


if __name__ == "__main__":
    main()
