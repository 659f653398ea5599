"""Single-bit flips at random places under the seal: each is found by `verify --full`, in the right file.

Half of the places are drawn by bytes (so mostly chunk objects), half evenly over the files (so that small
ones get their share).
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_damage import everything, flip, same, sealed_files
from helpers_store import make_store
from nearline.store import NearlineError
from nearline.store.verify import verify

STORES: dict[str, dict[str, Any]] = {
    "float16": {"storage_dtype": "float16"},
    "bfloat16, zstd": {"storage_dtype": "bfloat16", "compressor": "zstd"},
}


def places(store: Path, n_flips: int, seed: int) -> list[tuple[str, int]]:
    """File and bit of each flip."""
    rng, names = np.random.default_rng(seed), sealed_files(store)
    sizes = np.array([(store / name).stat().st_size for name in names])
    by_bytes = rng.choice(len(names), n_flips // 2, p=sizes / sizes.sum())
    evenly = rng.choice(len(names), n_flips - n_flips // 2)
    chosen = [*by_bytes.tolist(), *evenly.tolist()]
    return [(names[index], int(rng.integers(8 * sizes[index]))) for index in chosen]


def check_flips(store: Path, n_flips: int, seed: int) -> Counter[str]:
    """Flip, verify, flip back; what kinds of files were hit."""
    hit: Counter[str] = Counter()
    right = everything(store)
    for name, bit in places(store, n_flips, seed):
        flip(store / name, bit)
        found = verify(store, level="full")
        assert {problem.file for problem in found.problems} == {name}, (name, bit, found.problems)
        assert found.exit_code == 1
        assert name.rpartition("/")[2] in found.problems[0].message
        try:
            values = everything(store)
        except NearlineError:
            pass
        else:
            assert same(values, right)  # a file that this reader does not need
        flip(store / name, bit)
        hit[kind(name)] += 1
    assert verify(store, level="full").whole
    return hit


def kind(name: str) -> str:
    if "/c/" in name:
        return "chunk objects"
    return "zarr.json" if name.endswith("zarr.json") else "block records" if "blocks/" in name else name


@pytest.mark.parametrize("how", STORES)
@pytest.mark.parametrize("n_flips", [25, pytest.param(250, marks=pytest.mark.long)])
def test_every_flip_is_found_in_its_file(tmp_path: Path, how: str, n_flips: int) -> None:
    settings = {"n_tokens": 120, "block": 40, "layers": [2, 5], "d": 128, "sequence_length": 16}
    store = make_store(tmp_path / "s", **settings, **STORES[how])
    hit = check_flips(store, n_flips, seed=n_flips)
    assert hit.total() == n_flips
    print(f"{how}: {n_flips} of {n_flips} flips found, each in its file: {dict(hit.most_common())}")


def test_the_places_are_drawn_as_they_should_be(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", n_tokens=500, block=160)
    names = Counter(kind(name) for name, _ in places(store, 400, seed=1))
    assert names["chunk objects"] > 200
    assert names["zarr.json"] > 20
    assert names["block records"] > 4
    assert len({name for name, _ in places(store, 400, seed=1)}) > 60
