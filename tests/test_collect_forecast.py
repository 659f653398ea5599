"""`nearline plan` says what a harvest will take, refuses what the harvest would refuse, leaves nothing."""

import json
import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_harvest import files_of, texts
from helpers_models import tiny_model, tiny_tokenizer
from nearline.collect import needs
from nearline.collect.anatomy import anatomy
from nearline.collect.buffers import Shape
from nearline.collect.forecast import Forecast, forecast
from nearline.collect.harvesting import collect
from nearline.collect.needs import largest_batch, needs_of, padded_tokens
from nearline.collect.planning import build_plan
from nearline.collect.settings import HarvestSettings, parse
from nearline.collect.windows import Cutting
from nearline.store import NearlineError, Reader
from nearline.store.errors import EnvironmentFault, OutOfRange, UsageError
from nearline.store.hub_limits import hub_limits
from nearline.workflows.show import jsonable
from transformers import LlamaConfig, LlamaForCausalLM

SMALL: dict[str, Any] = {
    "tokens": 900,
    "sequence_length": 24,
    "min_length": 4,
    "batch_tokens": 96,
    "block": 90,
    "threads": 1,
}


def saved(folder: Path, model: Any) -> str:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and a corpus as a user has them, in files."""
    folder = tmp_path_factory.mktemp("world")
    saved(folder / "model", tiny_model("llama")[0])
    rows = [json.dumps({"text": text}) for text in texts(1200)]
    (folder / "corpus.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return folder


def settings_of(world: Path, **overrides: Any) -> HarvestSettings:
    inputs = {"model": str(world / "model"), "corpus": f"jsonl:{world / 'corpus.jsonl'}"}
    return parse({**inputs, **SMALL, **overrides})


def test_the_numbers_are_those_of_the_store(world: Path, tmp_path: Path) -> None:
    settings = settings_of(world)
    found = forecast(settings, tmp_path / "store", probe=False)
    reader = Reader.open(collect(settings, tmp_path / "store").path)
    assert (found.n_tokens, found.block, found.n_blocks) == (900, 90, 10)
    assert reader.manifest is not None
    assert (found.n_objects, found.store_bytes) == (reader.manifest.n_objects, reader.manifest.chunk_bytes)
    assert found.bytes_per_token == reader.manifest.chunk_bytes / 900
    split = reader.column("split")
    assert list(found.splits.values()) == np.bincount(split, minlength=3).tolist()
    n_files = len(files_of(tmp_path / "store", without=("runs",)))
    assert n_files <= found.n_files <= n_files + 8
    n_folders = sum(path.is_dir() for path in (tmp_path / "store").rglob("*"))
    assert found.n_folders <= n_folders <= found.n_folders + 50, "and a few for each array and layer"
    model, _ = tiny_model("llama")
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert found.device_parts["model"] == weights
    assert found.speeds is None
    assert Forecast(**{**json.loads(json.dumps(jsonable(found)))}).block == 90, "plain enough for JSON"


def test_nothing_is_left_in_the_target(world: Path, tmp_path: Path) -> None:
    forecast(settings_of(world), tmp_path / "new" / "deep" / "store")
    assert not list(tmp_path.iterdir())
    (tmp_path / "empty").mkdir()
    forecast(settings_of(world), tmp_path / "empty")
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]
    with pytest.raises(UsageError, match="too few tokens"):
        forecast(settings_of(world, tokens=20), tmp_path / "other" / "store")
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def little_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(needs, "available_memory_bytes", lambda: 2**16)


def little_space(patch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))


def few_files(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(needs, "free_files", lambda _: 10)


def all_well(patch: pytest.MonkeyPatch) -> None:
    pass


REFUSED: list[tuple[Callable[[pytest.MonkeyPatch], None], dict[str, Any], type[NearlineError], str]] = [
    (
        little_memory,
        {},
        EnvironmentFault,
        "block buffers need .* MiB and a batch .* this machine has 0.1 MiB",
    ),
    (little_space, {}, EnvironmentFault, "GiB are needed, 0.000 GiB are free"),
    (few_files, {}, EnvironmentFault, "files and folders are needed, the file system has room for 10"),
    (all_well, {"memory_limit": "1 KiB"}, UsageError, "block=90 needs .* the memory limit is"),
    (all_well, {"block": 2 * 10**6}, UsageError, "a chunk is at most 64 MiB"),
    (all_well, {"sequence_length": 999, "batch_tokens": 999}, UsageError, "takes at most 128 positions"),
]


@pytest.mark.parametrize(
    ("cause", "overrides", "kind", "words"), REFUSED, ids=[case[3][:20] for case in REFUSED]
)
def test_what_cannot_fit_is_refused_in_the_words_of_the_harvest(
    world: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cause: Callable[[pytest.MonkeyPatch], None],
    overrides: dict[str, Any],
    kind: type[NearlineError],
    words: str,
) -> None:
    cause(monkeypatch)
    settings, said = settings_of(world, **overrides), []
    for run in (forecast, collect):
        with pytest.raises(kind, match=words) as caught:
            run(settings, tmp_path / "store")
        said.append(str(caught.value))
        assert not (tmp_path / "store").exists()
    assert said[0] == said[1]


def test_a_folder_in_use_is_refused_and_left_alone(world: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("five years", encoding="utf-8")
    with pytest.raises(UsageError, match="not empty"):
        forecast(settings_of(world), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_value_that_the_store_cannot_hold_is_found_by_the_probe(world: Path, tmp_path: Path) -> None:
    model, _ = tiny_model("llama")
    model.model.layers[1].mlp.down_proj.weight.data *= 1e6
    settings = settings_of(world, model=saved(tmp_path / "model", model), storage_dtype="float16")
    with pytest.raises(OutOfRange, match=r"`mlp_output` layer 1, token row .* Nothing was committed"):
        forecast(settings, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_an_unfinished_store_counts_what_is_left(world: Path, tmp_path: Path) -> None:
    settings, path = settings_of(world), tmp_path / "store"
    collect(settings, path)
    for name in ("SEALED", "manifest.json", "blocks/000008.json", "blocks/000009.json"):
        (path / name).unlink()
    before = files_of(path)
    found = forecast(settings, path)
    assert (found.n_committed, found.missing_bytes) == (8, found.store_bytes // 5)
    assert found.speeds is not None
    whole = forecast(settings, tmp_path / "other").speeds
    assert whole is not None
    ratio = (found.speeds.model_s * found.speeds.padded_tokens_per_s) / (
        whole.model_s * whole.padded_tokens_per_s
    )
    assert 0.15 < ratio < 0.25, "two of ten blocks"
    with pytest.raises(UsageError, match="the store was begun with"):
        forecast(settings_of(world, storage_dtype="float32"), path, probe=False)
    assert files_of(path) == before


def test_time_is_that_of_the_slower_side_and_of_the_own_blocks(world: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int, str]] = []

    def keep(stage: str, done: int, total: int, unit: str) -> None:
        calls.append((stage, done, total, unit))

    found = forecast(settings_of(world), tmp_path / "store", progress=keep)
    speeds = found.speeds
    assert speeds is not None
    assert speeds.write_s == pytest.approx(found.store_bytes / speeds.write_bytes_per_s)
    assert speeds.seconds == pytest.approx(max(speeds.model_s, speeds.write_s) + speeds.write_s / 10)
    assert calls[-1][0] == "probe"
    assert calls[-1][1] == calls[-1][2]
    half = forecast(settings_of(world, rank=1, world_size=2), tmp_path / "store").speeds
    assert half is not None
    assert half.write_s * half.write_bytes_per_s == pytest.approx(found.store_bytes / 2)


def test_padded_tokens_are_those_of_the_batches(world: Path, tmp_path: Path) -> None:
    plan = Reader.open(collect(settings_of(world), tmp_path / "store").path).plan
    batches = [batch for block in range(plan.n_blocks) for batch in plan.batches_of(block)]
    slow = [len(batch) * int(plan.length[batch.start : batch.stop].max()) for batch in batches]
    assert padded_tokens(plan).tolist() == slow
    assert largest_batch(plan) == (max(slow), int(plan.length.max()))


def forecast_and_peak(settings: HarvestSettings, path: Path) -> tuple[Forecast, int]:
    """The forecast, and the largest resident size of this process while it then collects. A small harvest
    comes first, as the forecast counts the program as it is loaded when it works."""
    collect(settings.model_copy(update={"tokens": 3_000, "block": 600}), path.with_name("small"))
    found = forecast(settings, path, probe=False)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak counts anew from here
    collect(settings, path)
    words = [line.split() for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines()]
    return found, next(int(word[1]) * 1024 for word in words if word[0] == "VmHWM:")


def test_the_peak_of_memory_is_the_one_that_is_measured(world: Path, tmp_path: Path) -> None:
    """A model of many layers, so that buffers weigh more than the program around them wavers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=512, num_hidden_layers=16, num_attention_heads=4, vocab_size=160
    )
    wide = saved(tmp_path / "model", LlamaForCausalLM(config))
    sizes = {"tokens": 9_000, "block": 3_000, "batch_tokens": 3_000, "storage_dtype": "float32", "threads": 1}
    settings = settings_of(world, model=wide, **sizes)
    # In a process of its own: what other tests have freed would be used again, and nothing would come on top.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found, peak = pool.apply(forecast_and_peak, (settings, tmp_path / "store"))
    program = found.host_parts["program and texts"]
    assert found.host_parts["block buffers"] > 95 * 2**20
    print(f"measured {peak / 2**20:.0f} MiB, forecast {found.host_bytes / 2**20:.0f} MiB: {found.host_parts}")
    assert peak - program == pytest.approx(found.host_bytes - program, rel=0.3), "what comes on top"
    assert peak == pytest.approx(found.host_bytes, rel=0.15)


def test_the_hubs_limits() -> None:
    sizes = {"n_files": 90_000, "most_entries": 9_000, "largest_bytes": 2**26, "n_bytes": 10**12}
    found = {limit.name: limit for limit in hub_limits(**sizes)}
    assert [limit.fits for limit in found.values()] == [True, True, True, False, False]
    assert found["commits of an upload, within an hour"].value == 900
    sizes |= {"n_files": 800_000, "most_entries": 10_001, "largest_bytes": 10**12}
    assert not any(limit.fits for limit in hub_limits(**sizes))


def test_pinned_buffers_are_counted_as_torch_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each site's buffer in the next power of two; and what of a model runs on a GPU is a GPU's."""
    net = anatomy(tiny_model("llama")[0])
    shape = Shape((0, 1, 2), 32, 100, "bfloat16")
    cutting = Cutting(sequence_length=50, min_length=4, batch_tokens=100, seed=0, bos_id=None)
    splits = np.array([0, 2, 1], np.uint8)
    plan = build_plan(
        np.array([100] * 3), splits, ("a", "b", "c"), tokens=300, block=100, cutting=cutting
    ).plan
    plain = needs_of(net, shape, plan)
    monkeypatch.setattr(needs, "working_device", lambda _: torch.device("cuda"))
    pinned = needs_of(net, shape, plan)
    assert (plain.device, pinned.device) == ("cpu", "cuda")
    more = 2 * (32768 - 3 * 6400) + 8192 - 6400
    assert pinned.buffer_bytes == plain.buffer_bytes + 2 * more
    assert pinned.host_bytes == pinned.buffer_bytes + pinned.packing_bytes
