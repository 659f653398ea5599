"""Analyses and fits in processes that die at the n-th change they make to a study, or at one to some path.

In: tasks (a study, settings, at which change to die). Out: of each the exit code and how many changes it
came to. A change is whatever the interpreter announces of files being opened for writing, renamed or removed,
and of folders being made or removed, anywhere under the study. One process imports everything and forks a
child a task before it has any thread: imports are paid for once.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
ONE_THREAD["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow's allocator starts one on import
DIED = 77
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "shutil.rmtree")


def run_all(tasks: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Each task in turn: `study`, `settings` of the analysis (of a fit of `stores` where they are given),
    `die_at` (0: never) or `die_on` (a pattern of a path). `code`, `changes`.
    """
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(tasks),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **ONE_THREAD},
    )
    return json.loads(done.stdout)


def _child(task: dict[str, Any], out: int) -> None:
    from nearline.analyze import AnalyzeSettings, FitSettings, analyze, fit

    folder, count = os.path.realpath(task["study"]), 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        changes = event in _CHANGES or (event == "open" and bool(arguments[2] & _WRITES))
        if not changes or not isinstance(arguments[0], str | os.PathLike):
            return
        path = os.fsdecode(arguments[0])
        if path.startswith(folder):
            count += 1
            if count == task.get("die_at") or re.search(task.get("die_on", "\0"), path):
                os._exit(DIED)

    sys.addaudithook(watch)
    if "stores" in task:
        fit(folder, task["stores"], FitSettings(**task["settings"]))
    else:
        analyze(folder, AnalyzeSettings(**task["settings"]))
    os.write(out, str(count).encode())
    os._exit(0)


def _serve() -> None:
    from nearline.analyze.analyze_settings import ANALYSES

    for name in ANALYSES:
        __import__(f"nearline.analyze.{name}")
    found = []
    for task in json.load(sys.stdin):
        inside, outside = os.pipe()
        if (child := os.fork()) == 0:
            try:
                _child(task, outside)
            finally:
                os._exit(1)
        os.close(outside)
        content = os.read(inside, 64)
        os.close(inside)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found.append({"code": code, "changes": int(content or task.get("die_at", 0))})
    print(json.dumps(found))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    _serve()
