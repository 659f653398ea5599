"""A harvest holds after 200 batches what it held after 50, and leaves nothing behind; leaks are seen."""

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import helpers_memory
import pytest
from helpers_harvest import harvested
from helpers_memory import D_MODEL, LEAKING, LOOKS, ROWS
from helpers_models import tiny_model, tiny_tokenizer
from nearline.analyze import fit
from nearline.collect.peeking import peek

TENSOR_BYTES = ROWS * D_MODEL * 4  # what a site shows in one batch
# What may grow without being a leak: each committed block is remembered by its number, and Python's own
# tables settle late. Fifteen blocks are committed between the looks; less than four tensors is far from one a
# batch.
SETTLING_BYTES = 4 * TENSOR_BYTES
# The allocators of C and of torch take memory in arenas of their own sizes.
ARENA_BYTES = 3 * 2**20


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, int]]:
    """What a process held after each of the looks at a long run."""
    folder = tmp_path_factory.mktemp("memory")
    program = [sys.executable, helpers_memory.__file__, str(folder)]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=280)
    looks = {int(number): look for number, look in json.loads(done.stdout.splitlines()[-1]).items()}
    assert list(looks) == [*LOOKS, *LEAKING]
    return looks


def growth(seen: dict[int, dict[str, int]], what: str, start: int, stop: int) -> int:
    return seen[stop][what] - seen[start][what]


@pytest.mark.parametrize(
    ("what", "limit"),
    [
        # Buffers are allocated once, and what a batch allocates is gone when it ends: not one byte more.
        ("tensors", 0),
        ("gpu", 0),
        ("allocated", SETTLING_BYTES),
        ("process", ARENA_BYTES),
    ],
)
def test_nothing_grows_with_the_batches(seen: dict[int, dict[str, int]], what: str, limit: int) -> None:
    assert growth(seen, what, LOOKS[0], LOOKS[-1]) <= limit, seen
    assert growth(seen, what, LOOKS[1], LOOKS[-1]) <= limit, seen


def test_a_hook_that_keeps_what_it_sees_is_seen_by_every_measure(seen: dict[int, dict[str, int]]) -> None:
    for start, stop in ((LOOKS[-1], LEAKING[0]), LEAKING):
        kept = growth(seen, "kept", start, stop)
        assert kept > 10 * SETTLING_BYTES, "or the next lines say nothing"
        assert growth(seen, "tensors", start, stop) == kept
        assert growth(seen, "allocated", start, stop) > kept - SETTLING_BYTES, seen
    kept = growth(seen, "kept", LOOKS[-1], LEAKING[-1])
    held = growth(seen, "process", LOOKS[-1], LEAKING[-1]) + growth(seen, "gpu", LOOKS[-1], LEAKING[-1])
    assert held > 2 * kept - ARENA_BYTES, seen
    assert kept > ARENA_BYTES, "or the last line says nothing"


def hooked(model: Any) -> bool:
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def half_way(stage: str, done: int, total: int, unit: str) -> None:
    if done > total // 2:
        raise RuntimeError("stopped half-way")


def test_hooks_are_gone_after_a_run_and_after_one_that_failed(tmp_path: Path) -> None:
    model = tiny_model("llama")[0]
    with pytest.raises(RuntimeError, match="half-way"):
        harvested(tmp_path / "store", model=model, threads=1, progress=half_way)
    assert not hooked(model)
    harvested(tmp_path / "store", model=model, threads=1)
    assert not hooked(model)


def test_nothing_keeps_the_model_alive(tmp_path: Path) -> None:
    model = tiny_model("llama")[0]
    gone = weakref.ref(model)
    harvested(tmp_path / "store", model=model, threads=1)
    fit(tmp_path / "study", [tmp_path / "store"])
    previewed = peek(model, tiny_tokenizer(), "the same text", tmp_path / "study")
    del model
    gc.collect()
    assert gone() is None
    assert previewed.error.size


def test_nothing_keeps_the_model_alive_after_a_run_that_failed(tmp_path: Path) -> None:
    model = tiny_model("llama")[0]
    gone = weakref.ref(model)
    with pytest.raises(RuntimeError) as caught:
        harvested(tmp_path / "store", model=model, threads=1, progress=half_way)
    del model, caught  # the error's traceback holds the frames, and these the model
    gc.collect()
    assert gone() is None
