"""A store of 800,000 objects opens and is planned in seconds and in less than 1 GiB.

Every command runs in a process of its own, whose peak memory the kernel keeps. Times are printed, not
asserted: they belong to the machine.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_scale import large_store
from nearline import store
from nearline.store import Plan, Reader

LIMIT_MIB = 1024

COMMANDS = {
    "Reader.open": "from nearline.store import Reader; work = lambda: Reader.open(store)",
    "store.open": "import nearline.store; work = lambda: nearline.store.open(store)",
    "info": "from nearline.store import info; work = lambda: info(store)",
    "verify --quick": "from nearline.store.verify import verify; work = lambda: require_whole(verify(store))",
    "seal": "from nearline.store import seal; work = lambda: seal(store)",
}
# The plan of a corpus whose documents have a log-normal length, and its way to plan.json and back.
PLANNING = """
import numpy as np
from nearline.collect.planning import assign_splits, build_plan
from nearline.collect.windows import Cutting
from nearline.store.parsing import MAX_JSON_BYTES, parse_json
from nearline.store.plan import Plan
random = np.random.default_rng(0)
lengths = np.minimum(random.lognormal(5.6, 1.0, n_documents).astype(np.int64) + 1, 20_000)
keys = [random.bytes(16).hex() for _ in range(n_documents)]

def work():
    splits = assign_splits(np.arange(n_documents), keys)
    cutting = Cutting(sequence_length=512, min_length=16, batch_tokens=16_384, seed=0, bos_id=0)
    planned = build_plan(lengths, splits, keys, tokens=tokens, block=tokens // 5000, cutting=cutting)
    assert planned.plan.n_tokens == tokens and planned.plan.n_blocks == 5000
    content = planned.plan.to_json_bytes()
    assert Plan.parse(parse_json(content, "plan.json", MAX_JSON_BYTES)).digest == planned.plan.digest
"""
MEASURED = """
import json, sys, time
def require_whole(verified):
    assert verified.whole, verified.problems[:3]
globals().update(json.loads(sys.argv[1]))
exec(code)
started, cpu_s = time.perf_counter(), time.process_time()
work()
seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
words = [line.split() for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(json.dumps({"seconds": seconds, "cpu_s": cpu_s, "peak_mib": int(words[0][1]) / 1024}))
"""


def measured(name: str, code: str, **names: Any) -> dict[str, float]:
    """Run `work` of `code` in a new process: its seconds and the whole process's peak memory."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, json.dumps({"code": code, **names})], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(f"{name:16} {found['seconds']:7.2f} s  {found['cpu_s']:7.2f} s CPU  {found['peak_mib']:7.0f} MiB")
    return found


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_store(tmp_path_factory.mktemp("small") / "store", n_layers=4, n_blocks=250)


def test_opening_reads_no_block_record(small: Path, tmp_path: Path) -> None:
    copy = tmp_path / "store"
    shutil.copytree(small, copy, ignore=shutil.ignore_patterns("blocks", "c"))
    shutil.copytree(
        small / "activations.zarr/norm_weight", copy / "activations.zarr/norm_weight", dirs_exist_ok=True
    )
    assert Reader.open(copy).n_blocks == 250
    assert store.open(copy)["residual"].shape == (4, 250_000, 64)


def test_opening_lazily_opens_the_store_once(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, plain = [], Reader.open

    def counted(*arguments: Any, **options: Any) -> Reader:
        opened.append(arguments)
        return plain(*arguments, **options)

    monkeypatch.setattr(Reader, "open", counted)
    data, again = store.open(small), store.open(small)
    assert len(opened) == 2
    names = {name: data[name].data.name for name in ("residual", "mlp_output", "nll")}
    assert len(set(names.values())) == 3
    assert names == {name: again[name].data.name for name in names}, "the same store, the same tasks"


def test_the_plan_is_written_out_once_however_many_blocks(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, plain = [], Plan.to_json_bytes

    def counted(plan: Plan) -> bytes:
        written.append(plan)
        return plain(plan)

    monkeypatch.setattr(Plan, "to_json_bytes", counted)
    assert store.info(small)["n_objects"] == 250 * (2 * 4 + 10)
    assert len(written) == 1


def test_memory_of_reading_all_records_is_that_of_one(small: Path) -> None:
    commands = {name: COMMANDS[name] for name in ("Reader.open", "info")}
    peaks = {name: measured(name, code, store=str(small))["peak_mib"] for name, code in commands.items()}
    assert peaks["info"] < peaks["Reader.open"] + 16, "250 records of 2 KiB, one at a time"


def test_planning_stays_within_its_memory() -> None:
    found = measured("plan, 5 M tokens", PLANNING, n_documents=16_000, tokens=5_000_000)
    assert found["peak_mib"] < LIMIT_MIB / 4


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("large")
    yield large_store(folder / "store", n_layers=80, n_blocks=5_000, block=20_000, d=1_600, sequences=60)
    shutil.rmtree(folder)


@pytest.mark.long
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_store_of_800_000_objects(large: Path, name: str) -> None:
    assert measured(name, COMMANDS[name], store=str(large))["peak_mib"] < LIMIT_MIB


@pytest.mark.long
def test_a_plan_of_100_million_tokens() -> None:
    assert measured("plan", PLANNING, n_documents=300_000, tokens=100_000_000)["peak_mib"] < LIMIT_MIB
