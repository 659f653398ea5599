"""A harvest that was stopped anywhere goes on to the same bytes; other settings are refused by name."""

import errno
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_harvest import files_of, texts
from helpers_models import tiny_model, tiny_tokenizer
from nearline.collect import collect, harvest, parse_settings, stopping
from nearline.collect.claim import claimed
from nearline.collect.pipeline import Pipeline
from nearline.collect.stopping import TimeIsUp, Watch, parse_duration
from nearline.store import Progress, Reader, StoreWriter, durable
from nearline.store.errors import EnvironmentFault, NearlineError, UsageError

SETTINGS: dict[str, Any] = {
    "tokens": 300,
    "sequence_length": 24,
    "min_length": 4,
    "batch_tokens": 48,
    "block": 50,
    "threads": 1,
    "storage_dtype": "float32",
}
N_BLOCKS = 6


class Stopped(Exception):
    """What the tests stop a run with."""


def run(path: Path, *, model: Any = None, tokenizer: Any = None, words: Any = None, **changes: Any) -> Path:
    return harvest(
        model or tiny_model("llama")[0],
        tokenizer or tiny_tokenizer(),
        words or texts(),
        path,
        **{**SETTINGS, **changes},
    )


def store_files(path: Path) -> dict[str, bytes]:
    return files_of(path, without=("runs", "README.md"))


def records(path: Path) -> list[int]:
    return sorted(int(file.stem) for file in (path / "blocks").glob("*.json"))


def stop_after(n_batches: int) -> Progress:
    """A progress callback that stops the run behind its n-th batch."""
    calls = iter(range(n_batches - 1))

    def progress(stage: str, done: int, total: int, unit: str) -> None:
        if next(calls, None) is None:
            raise Stopped

    return progress


def stop_in_block(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the writer fails in this block."""
    commit = StoreWriter.commit

    def failing(self: StoreWriter, number: int, *rest: Any) -> Any:
        if number == block:
            raise Stopped
        return commit(self, number, *rest)

    monkeypatch.setattr(StoreWriter, "commit", failing)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run that nothing stopped."""
    return store_files(run(tmp_path_factory.mktemp("whole") / "store"))


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two of its six blocks."""
    path = tmp_path_factory.mktemp("unfinished") / "store"
    with pytest.MonkeyPatch.context() as patch:
        stop_in_block(2, patch)
        with pytest.raises(Stopped):
            run(path)
    assert records(path) == [0, 1]
    return path


@pytest.mark.parametrize("block", range(N_BLOCKS))
def test_stopped_in_any_block_the_bytes_are_the_same(
    block: int, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_in_block(block, monkeypatch)
    with pytest.raises(Stopped):
        run(tmp_path / "store")
    monkeypatch.undo()
    assert records(tmp_path / "store") == list(range(block))
    assert (tmp_path / "store").exists() == bool(block), "with nothing committed, nothing is left"
    run(tmp_path / "store")
    assert store_files(tmp_path / "store") == whole


@pytest.mark.parametrize("n_batches", [1, 2, 3, 4, 7, 9])
def test_stopped_behind_any_batch_the_bytes_are_the_same(
    n_batches: int, whole: dict[str, bytes], tmp_path: Path
) -> None:
    with pytest.raises(Stopped):
        run(tmp_path / "store", progress=stop_after(n_batches))
    run(tmp_path / "store")
    assert store_files(tmp_path / "store") == whole


def test_a_run_goes_on_behind_the_committed_blocks(unfinished: Path, tmp_path: Path) -> None:
    store = shutil.copytree(unfinished, tmp_path / "store")
    kept = {path: path.stat().st_mtime_ns for path in store.rglob("*/c/**/*") if path.is_file()}
    kept = {path: when for path, when in kept.items() if "/0/0" in str(path) or "/1/0" in str(path)}
    seen: list[tuple[int, int]] = []
    run(store, progress=lambda stage, done, total, unit: seen.append((done, total)))
    assert seen[-1] == (200, 200), "four blocks were left"
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    facts = [json.loads(path.read_text()) for path in (store / "runs").glob("*.json")]
    assert [(one["n_blocks"], one["n_tokens"]) for one in facts] == [(4, 200)]


def test_a_damaged_last_block_is_collected_again(
    unfinished: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    store = shutil.copytree(unfinished, tmp_path / "store")
    chunk = store / "activations.zarr/mlp_output/c/1/1/0"
    content = bytearray(chunk.read_bytes())
    content[100] ^= 4
    chunk.write_bytes(content)
    run(store)
    assert store_files(store) == whole


def test_a_sealed_store_needs_nothing(whole: dict[str, bytes], tmp_path: Path) -> None:
    store = run(tmp_path / "store")
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*") if path.is_file()}
    run(store, progress=lambda *_: pytest.fail("a block was collected"))
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*") if path.is_file()} == before


# ---- other settings


def other_model() -> Any:
    model, _ = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    return model


CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("weights", {"model": other_model}, "the weights of the model"),
    ("tokenizer", {"tokenizer": lambda: tiny_tokenizer(150)}, "the tokenizer"),
    (
        "text",
        {"words": lambda: [text.replace("fox", "cat", 1) for text in texts()]},
        "the texts of the corpus",
    ),
    ("fewer texts", {"words": lambda: texts()[:-1]}, "the texts of the corpus|`corpus.n_documents` = 60"),
    ("compute dtype", {"model": lambda: tiny_model("llama", dtype=torch.bfloat16)[0]}, "the weights of the"),
    ("tokens", {"tokens": 350}, "the number of token rows, `plan.n_tokens` = 300, this run has 350"),
    ("block", {"block": 60}, "`plan.*` = .*, this run has"),
    ("storage dtype", {"storage_dtype": "float16"}, "`storage.dtype` = 'float32', this run has 'float16'"),
    ("threads", {"threads": 2}, "the number of threads, `compute.torch_threads` = 1, this run has 2"),
    ("seed", {"seed": 1}, "`plan.seed` = 0, this run has 1"),
    ("layers", {"layers": "0,2"}, "`storage.layers` = .*, this run has"),
    ("sequence length", {"sequence_length": 20}, "`plan.sequence_length` = 24, this run has 20"),
    ("min length", {"min_length": 5}, "`plan.min_length` = 4, this run has 5"),
    ("batches", {"batch_tokens": 96}, "`plan.batch_tokens` = 48, this run has 96"),
    ("bos", {"bos": "always"}, "`.*bos.*` = .*, this run has"),
    ("mask", {"on_nonfinite": "mask"}, "`policies.nonfinite` = 'stop', this run has 'mask'"),
    ("compressor", {"compressor": "zstd"}, "`storage.compressor` = None, this run has 'zstd'"),
    ("name", {"name": "other"}, "`model.name` = .*, this run has 'other'"),
]


@pytest.mark.parametrize(("changes", "says"), [one[1:] for one in CHANGES], ids=[one[0] for one in CHANGES])
def test_a_changed_setting_is_refused_by_name(changes: dict[str, Any], says: str, unfinished: Path) -> None:
    before = files_of(unfinished)
    given = {key: value() if callable(value) else value for key, value in changes.items()}
    with pytest.raises(UsageError, match=f"the store was begun with .*{says}") as caught:
        run(unfinished, **given)
    assert "name a new folder, or repeat the settings" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert files_of(unfinished) == before


@pytest.mark.parametrize(
    "changes", [{"max_time": "1h"}, {"memory_limit": "1 GiB"}, {"rank": 0, "world_size": 1}]
)
def test_what_does_not_shape_the_bytes_may_change(
    changes: dict[str, Any], unfinished: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    store = shutil.copytree(unfinished, tmp_path / "store")
    run(store, **changes)
    assert store_files(store) == whole


def test_a_sealed_store_of_other_settings_is_refused(tmp_path: Path) -> None:
    store = run(tmp_path / "store")
    before = files_of(store)
    with pytest.raises(UsageError, match=r"`storage\.dtype` = 'float32', this run has 'float16'"):
        run(store, storage_dtype="float16")
    assert files_of(store) == before


def test_a_store_with_foreign_files_is_refused_before_the_model_is_loaded(
    unfinished: Path, tmp_path: Path
) -> None:
    store = shutil.copytree(unfinished, tmp_path / "store")
    (store / "thesis.tex").write_text("five years")
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        collect(parse_settings({"model": "no/such-model"}), store)
    assert (store / "thesis.tex").read_text() == "five years"


def test_other_settings_may_follow_a_run_that_committed_nothing(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run(tmp_path / "store", progress=stop_after(1))
    assert not (tmp_path / "store").exists()
    assert Reader.open(run(tmp_path / "store", storage_dtype="float16")).storage_dtype == "float16"


def test_what_is_no_stores_is_refused_and_stays(tmp_path: Path) -> None:
    """`runs` is a common name, and so is the ending `.partial`."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "events.tensorboard").write_text("mine")
    (tmp_path / "film.mp4.partial").write_text("mine")
    with pytest.raises(UsageError, match=r"is not empty \(it holds film\.mp4\.partial, runs/events"):
        run(tmp_path)
    assert files_of(tmp_path) == {"runs/events.tensorboard": b"mine", "film.mp4.partial": b"mine"}


def test_giving_a_folder_back_leaves_what_is_no_temporary_and_hides_no_error(tmp_path: Path) -> None:
    (tmp_path / "probe.0123456789ab.partial" / "0").mkdir(parents=True)  # `plan` was killed while it measured

    def fail() -> None:
        with claimed(tmp_path) as claim:
            claim.begun = True
            (tmp_path / "film.mp4.partial").write_text("mine")  # put there meanwhile
            raise Stopped("the reason")

    with pytest.raises(Stopped, match="the reason"):
        fail()
    assert [path.name for path in tmp_path.rglob("*")] == ["film.mp4.partial"]


def test_an_error_of_the_writer_is_told_although_the_run_stops() -> None:
    going, fault = threading.Event(), EnvironmentFault("no space is left on the disk")

    def write(buffer: int, job: str) -> None:
        going.wait(10)
        raise fault

    def stop() -> None:
        with Pipeline(write, [1, 2]) as pipeline:
            pipeline.submit(pipeline.borrow(), "job")
            going.set()
            raise Stopped

    with pytest.raises(EnvironmentFault, match="no space") as caught:
        stop()
    assert caught.value is fault


def test_what_another_run_began_is_not_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Stopped):
        run(tmp_path / "store", progress=stop_after(1), rank=1, world_size=2)
    begun = store_files(tmp_path / "store")
    with pytest.raises(Stopped):
        run(tmp_path / "store", progress=stop_after(1))
    assert store_files(tmp_path / "store") == begun


# ---- disk space


def test_a_run_needs_space_only_for_what_is_missing(
    unfinished: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_bytes = sum(len(content) for name, content in whole.items() if "/c/" in name)
    usage = type("usage", (), {"free": n_bytes * 5 // 6})
    store = shutil.copytree(unfinished, tmp_path / "store")
    monkeypatch.setattr(durable.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(EnvironmentFault, match="are needed"):
        run(tmp_path / "new")
    run(store)
    assert store_files(store) == whole


# ---- time limits


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7h30m", 27_000), ("45m", 2_700), ("90s", 90), ("1d", 86_400), ("2 h", 7_200), ("1H5M3S", 3_903)],
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds
    assert parse_settings({"max_time": text}).max_time_s == seconds


@pytest.mark.parametrize("text", ["", "7", "h", "0s", "-1h", "1.5h", "30m7h", "soon"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError, match="no duration above zero; write 7h30m, 45m or 90s") as caught:
        parse_settings({"max_time": text})
    assert "Stop cleanly before" in str(caught.value)


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(stopping, "now", lambda: self.now_s)


def test_a_block_begins_only_when_there_is_time_for_one_like_the_slowest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    watch = Watch(limit_s=100)
    watch.before_block()  # the first one may always try
    watch.block_took(30)
    watch.block_took(20)
    clock.now_s = 70
    watch.before_block()
    clock.now_s = 71
    with pytest.raises(stopping.StopNow):
        watch.before_block()
    watch.before_batch()
    clock.now_s = 101
    with pytest.raises(stopping.StopNow):
        watch.before_batch()


@pytest.mark.parametrize("n_batches", [1, 5])
def test_a_time_limit_drops_the_block_in_hand_and_keeps_the_others(
    n_batches: int, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, calls = Clock(monkeypatch), iter(range(n_batches - 1))

    def progress(stage: str, done: int, total: int, unit: str) -> None:
        if next(calls, None) is None:
            clock.now_s = 3601.0

    with pytest.raises(TimeIsUp) as caught:
        run(tmp_path / "store", progress=progress, max_time="1h")
    assert caught.value.exit_code == 3
    n_committed = len(records(tmp_path / "store"))
    then = "the same command continues" if n_committed else "give it more time"
    how_far = f"{n_committed} of {N_BLOCKS} blocks are committed; {then}"
    assert str(caught.value).startswith(f"stopped after --max-time: {how_far}")
    assert ("give it more time, or a smaller block" in str(caught.value)) == (n_committed == 0)
    assert (n_committed > 0) == (n_batches > 2)
    facts = list((tmp_path / "store" / "runs").glob("*.json"))
    assert len(facts) == bool(n_committed)
    run(tmp_path / "store")
    assert store_files(tmp_path / "store") == whole


# ---- a full disk


def test_the_same_command_goes_on_when_there_is_space_again(
    whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, full = os.write, [False]

    def limited(descriptor: int, data: Any) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    def progress(stage: str, done: int, total: int, unit: str) -> None:
        full[0] = full[0] or done > 150

    monkeypatch.setattr("os.write", limited)
    with pytest.raises(EnvironmentFault, match="no space is left on the disk") as caught:
        run(tmp_path / "store", progress=progress)
    full[0] = False
    n_committed = len(records(tmp_path / "store"))
    assert f"{n_committed} of {N_BLOCKS} blocks are committed" in str(caught.value)
    assert "the same command continues" in str(caught.value)
    assert caught.value.exit_code == 4
    assert n_committed >= 1
    run(tmp_path / "store")
    assert store_files(tmp_path / "store") == whole


@pytest.mark.long
def test_a_full_file_system_for_real(whole: dict[str, bytes], tmp_path: Path) -> None:
    """A tmpfs that somebody else fills while the harvest runs; needs the right to mount."""
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(small)], check=True)
    try:
        ballast = small / "ballast"

        def progress(stage: str, done: int, total: int, unit: str) -> None:
            if done > 100 and not ballast.exists():
                with ballast.open("wb", buffering=0) as file:
                    try:
                        while True:
                            file.write(bytes(4096))
                    except OSError:
                        pass

        with pytest.raises(EnvironmentFault, match="no space is left on the disk"):
            run(small / "store", progress=progress)
        assert records(small / "store")
        with pytest.raises(NearlineError):
            Reader.open(small / "store")
        ballast.unlink()
        run(small / "store")
        assert store_files(small / "store") == whole
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_counts_of_a_collect(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_model("llama")[0].save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    given = {**SETTINGS, "model": str(folder), "corpus": f"jsonl:{tmp_path / 'corpus.jsonl'}"}
    with pytest.raises(Stopped):
        collect(parse_settings(given), tmp_path / "store", stop_after(7))
    n_before = len(records(tmp_path / "store"))
    done = collect(parse_settings(given), tmp_path / "store")
    assert (done.sealed, done.n_blocks, done.n_committed) == (True, N_BLOCKS, N_BLOCKS)
    assert done.n_collected == 300 - 50 * n_before
    assert done.n_tokens == 300
    assert done.notes[-1] == f"continued after {n_before} of {N_BLOCKS} blocks"
    again = collect(parse_settings(given), tmp_path / "store")
    assert again.notes[-1] == "nothing to do: the store is sealed, and was made with these settings"
    assert (again.sealed, again.n_collected, again.tokens_per_s) == (True, 0, 0.0)
    np.testing.assert_equal(Reader.open(tmp_path / "store").n_tokens, 300)
