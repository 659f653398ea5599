"""A harvest that cannot go on stops with one sentence; committed blocks stay, nothing poses as whole."""

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_harvest import Planted, harvested, texts
from helpers_models import MAX_POSITIONS, N_LAYERS, tiny_model, tiny_tokenizer
from nearline.collect import collect, parse_settings
from nearline.collect.pipeline import Pipeline
from nearline.collect.stopping import StopNow
from nearline.store import Reader, StoreWriter, durable
from nearline.store.errors import EnvironmentFault, NearlineError, NotFinite, OutOfRange, UsageError


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """A harvest that went well, with everything a broken one can be compared to."""
    return Reader.open(harvested(tmp_path_factory.mktemp("clean") / "store", storage_dtype="float32"))


def late_token(clean: Reader) -> tuple[int, int]:
    """A token id that first occurs in block 1 or later, and the first row where it does."""
    ids, first = np.unique(clean.column("token_id"), return_index=True)
    late = int(np.argmax(first))
    assert first[late] >= clean.block_range(1)[0]
    return int(ids[late]), int(first[late])


@pytest.mark.parametrize(
    ("value", "kind", "says"),
    [
        (70000.0, OutOfRange, r"\|value\| 70,000 does not fit float16, .* Use storage_dtype=bfloat16"),
        (
            float("nan"),
            NotFinite,
            r"not finite. Try another compute dtype \(dtype=float32\), or on_nonfinite=mask",
        ),
        (float("-inf"), NotFinite, r"not finite"),
    ],
)
def test_a_value_that_cannot_be_stored_stops_the_run(
    value: float, kind: type[NearlineError], says: str, clean: Reader, tmp_path: Path
) -> None:
    token, row = late_token(clean)
    with pytest.raises(kind, match=says) as caught:
        harvested(tmp_path / "store", model=Planted(value, token).model, storage_dtype="float16")
    message = str(caught.value)
    assert f"`mlp_output` layer 1, token row {row:,} (token id {token}" in message
    n_safe = row // clean.plan.block
    assert f"The {n_safe} blocks committed before are intact." in message
    assert not (tmp_path / "store" / "SEALED").exists()
    left = Reader.open(tmp_path / "store", require_seal=False)
    assert len(list((tmp_path / "store" / "blocks").glob("*.json"))) == n_safe
    for site, layer in (("residual", 2), ("mlp_output", 1), ("embedding", None)):
        wanted = clean.rows(site, layer, 0, n_safe).astype(np.float16).astype(np.float32)
        np.testing.assert_array_equal(left.rows(site, layer, 0, n_safe), wanted)


def test_70000_fits_the_dtypes_that_the_message_names(clean: Reader, tmp_path: Path) -> None:
    token, row = late_token(clean)
    for storage_dtype in ("bfloat16", "float32"):
        path = tmp_path / storage_dtype
        harvested(path, model=Planted(70000.0, token).model, storage_dtype=storage_dtype)
        found = Reader.open(path).rows("mlp_output", 1, 0, clean.n_blocks)[row, 3]
        assert found == torch.tensor(70000.0).to(getattr(torch, storage_dtype)).float()


def test_masked_rows_are_stored_as_not_valid(clean: Reader, tmp_path: Path) -> None:
    token, row = late_token(clean)
    model = Planted(float("nan"), token).model
    reader = Reader.open(
        harvested(tmp_path / "store", model=model, on_nonfinite="mask", storage_dtype="float32")
    )
    valid = reader.column("valid")
    values = np.stack([reader.rows("residual", layer, 0, reader.n_blocks) for layer in reader.layers])
    outputs = np.stack([reader.rows("mlp_output", layer, 0, reader.n_blocks) for layer in reader.layers])
    finite = np.isfinite(values).all(axis=(0, 2)) & np.isfinite(outputs).all(axis=(0, 2))
    np.testing.assert_array_equal(valid, finite)
    assert not valid[row]
    # Attention multiplies NaN by weight 0 too, so a whole sequence may be lost, but never another one.
    sequence, token_id = reader.column("sequence"), reader.column("token_id")
    assert set(sequence[~valid]) <= set(sequence[token_id == token])
    counts = sum(
        np.array(reader.record(block).statistics["mlp_output"]["n_nonfinite"])
        for block in range(reader.n_blocks)
    )
    np.testing.assert_array_equal(counts, (~np.isfinite(outputs)).sum(axis=(1, 2)))


class Stopped(Exception):
    """What the planted writer raises."""


def test_a_failing_writer_stops_the_run_at_once_with_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = tiny_model("llama")
    forwards: list[int] = []
    model.model.register_forward_pre_hook(lambda *_: forwards.append(len(forwards)))
    commit = StoreWriter.commit

    def failing(self: StoreWriter, block: int, *rest: Any) -> Any:
        if block == 2:
            raise Stopped("the writer is broken")
        return commit(self, block, *rest)

    monkeypatch.setattr(StoreWriter, "commit", failing)
    with pytest.raises(Stopped, match="the writer is broken"):
        harvested(tmp_path / "store", model=model, tokens=900, block=30)
    assert len(forwards) < 50, "30 blocks of at least one pass each, and a dozen for the proof"
    names = sorted(path.name for path in (tmp_path / "store" / "blocks").glob("*.json"))
    assert names == ["000000.json", "000001.json"]


@pytest.mark.parametrize("n_good", [0, 3, 30, 60, 150])
def test_a_full_disk_is_one_sentence_whenever_it_comes(
    n_good: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = os.write, iter(range(10**6))

    def full(descriptor: int, data: Any) -> int:
        if next(calls) >= n_good:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(durable.os, "write", full)
    with pytest.raises(EnvironmentFault, match="no space is left on the disk") as caught:
        harvested(tmp_path / "store")
    assert caught.value.exit_code == 4
    assert not (tmp_path / "store" / "SEALED").exists()
    monkeypatch.undo()
    if not (tmp_path / "store").exists():  # nothing was committed, so the same command can be run again
        harvested(tmp_path / "store")
        assert (tmp_path / "store" / "SEALED").exists()
    else:
        assert any((tmp_path / "store" / "blocks").glob("*.json"))
    assert not list(tmp_path.rglob("*.partial"))


def test_a_failed_start_removes_only_what_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    store.mkdir()

    def failing(self: StoreWriter, *rest: Any) -> Any:
        for name in ("film.mp4.partial", "notes.txt"):
            (store / name).write_text("somebody put this here meanwhile")
        raise Stopped

    monkeypatch.setattr(StoreWriter, "commit", failing)
    with pytest.raises(Stopped):
        harvested(store)
    assert sorted(path.name for path in store.iterdir()) == ["film.mp4.partial", "notes.txt"]


# ---- what a user may get wrong


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer in a folder, and corpora beside it."""
    folder = tmp_path_factory.mktemp("saved")
    tiny_model("llama")[0].save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts()))
    (folder / "empty.jsonl").write_text("")
    (folder / "one.jsonl").write_text(json.dumps({"body": "one single document"}) + "\n")
    return folder


GOOD: dict[str, Any] = {"tokens": 300, "sequence_length": 24, "min_length": 4}


def run(saved: Path, path: Path, **changes: Any) -> Any:
    given = {
        "model": str(saved / "model"),
        "corpus": f"jsonl:{saved / 'corpus.jsonl'}:body",
        **GOOD,
        **changes,
    }
    return collect(parse_settings(given), path)


def test_collect_says_what_it_did(saved: Path, tmp_path: Path) -> None:
    done = run(saved, tmp_path / "store", tokens=100_000)
    assert done.n_tokens == Reader.open(done.path).n_tokens < 100_000
    assert done.sample.split()[0] in " ".join(texts())
    assert done.tokens_per_s > 0
    assert 0 <= done.waited_s <= done.seconds
    assert [note for note in done.notes if "tokens lowered from 100,000" in note]
    assert [note for note in done.notes if "a verdict needs 20 groups" in note]
    (facts,) = (json.loads(path.read_text()) for path in (done.path / "runs").glob("*.json"))
    assert facts["n_tokens"] == done.n_tokens
    assert facts["uncompressed_bytes"] > 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "no-such/folder/here"}, "no-such/folder/here"),
        ({"corpus": "jsonl:missing.jsonl"}, "missing.jsonl: .*no such file"),
        ({"corpus": "jsonl:EMPTY"}, "holds no text"),
        ({"corpus": "jsonl:CORPUS:text"}, "no field 'text'; .* fields are 'body'"),
        ({"corpus": "jsonl:ONE:body"}, "too few documents: 1 documents in 1 groups"),
        ({"tokens": 2}, "too few tokens: 2 rows in blocks of 4 leave no block for gate and test"),
        ({"layers": "0-7"}, f"layers=0-7: this model has layers 0-{N_LAYERS - 1}"),
        (
            {"sequence_length": 4096},
            f"sequence_length=4096: this model takes at most {MAX_POSITIONS} positions",
        ),
        ({"min_length": 30}, "min_length=30 is above sequence_length=24"),
        (
            {"block": 5000, "memory_limit": "1 MiB"},
            "block=5,000 needs .* MiB of buffers, the memory limit is 1.0 MiB",
        ),
        ({"block": 10**9}, "block=1,000,000,000: a chunk is at most 64 MiB"),
        ({"bos": "always", "model": "NO BOS"}, "this tokenizer has no BOS token"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    changes: dict[str, Any], says: str, saved: Path, tmp_path: Path
) -> None:
    for name, file in {"EMPTY": "empty.jsonl", "CORPUS": "corpus.jsonl", "ONE": "one.jsonl"}.items():
        if "corpus" in changes:
            changes = {**changes, "corpus": changes["corpus"].replace(name, str(saved / file))}
    if changes.get("model") == "NO BOS":
        tiny_model("llama")[0].save_pretrained(tmp_path / "no-bos")
        tiny_tokenizer(bos=False).save_pretrained(tmp_path / "no-bos")
        changes = {**changes, "model": str(tmp_path / "no-bos")}
    with pytest.raises(UsageError, match=says) as caught:
        run(saved, tmp_path / "store", **changes)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "store").exists()


def test_a_folder_that_holds_something_is_refused_and_kept(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"is not empty \(it holds precious.txt\)"):
        run(saved, tmp_path)
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_a_folder_that_may_not_be_written(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Denied by a stand-in, not by permissions: these tests may run as root, whom no permission stops.
    def denied(self: Path, *rest: Any, **more: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(
        EnvironmentFault, match="permission is denied; choose a folder you may write to"
    ) as caught:
        run(saved, tmp_path / "store")
    assert caught.value.exit_code == 4


def test_too_little_disk_is_found_before_the_first_forward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = tiny_model("llama")
    model.model.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass ran"))
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr(durable.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        EnvironmentFault, match=r"0\.\d+ GiB are needed, 0\.000 GiB are free; free some space"
    ):
        harvested(tmp_path / "store", model=model)
    assert not (tmp_path / "store").exists()


# ---- the pipeline by itself


def test_the_pipeline_writes_in_order_and_reuses_its_buffers() -> None:
    written: list[tuple[str, int]] = []

    def write(buffer: str, job: int) -> None:
        written.append((buffer, job))

    with Pipeline(write, ["a", "b"]) as pipeline:
        for job in range(20):
            pipeline.submit(pipeline.borrow(), job)
    assert [job for _, job in written] == list(range(20))
    assert {buffer for buffer, _ in written} <= {"a", "b"}


def test_the_writers_error_reaches_a_model_that_waits_for_a_buffer() -> None:
    def failing(buffer: str, job: int) -> None:
        raise Stopped("disk")

    def submit_five() -> None:
        with Pipeline(failing, ["a"]) as pipeline:
            for job in range(5):
                pipeline.submit(pipeline.borrow(), job)

    with pytest.raises(Stopped, match="disk"):
        submit_five()


def test_the_writers_error_on_the_last_block_is_not_lost() -> None:
    def failing(buffer: str, job: int) -> None:
        raise Stopped("disk")

    with pytest.raises(Stopped, match="disk"), Pipeline(failing, ["a"]) as pipeline:
        pipeline.submit(pipeline.borrow(), 1)


def test_the_writers_error_is_the_news_also_when_a_stop_is_on_its_way() -> None:
    go = threading.Event()

    def failing(buffer: str, job: int) -> None:
        go.wait()
        raise Stopped("disk")

    def submit_and_stop() -> None:
        with Pipeline(failing, ["a", "b"]) as pipeline:
            pipeline.submit(pipeline.borrow(), 1)
            go.set()
            raise StopNow(by_signal=False)

    with pytest.raises(Stopped, match="disk") as caught:
        submit_and_stop()
    assert isinstance(caught.value.__cause__, StopNow)


def test_blocks_handed_over_are_written_when_the_model_fails() -> None:
    written: list[int] = []

    def write(buffer: str, job: int) -> None:
        written.append(job)

    def submit_and_fail() -> None:
        with Pipeline(write, ["a", "b"]) as pipeline:
            pipeline.submit(pipeline.borrow(), 1)
            pipeline.submit(pipeline.borrow(), 2)
            raise Stopped("model")

    with pytest.raises(Stopped, match="model"):
        submit_and_fail()
    assert written == [1, 2]
