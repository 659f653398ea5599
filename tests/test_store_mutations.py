"""The mutation list: each failure mode, injected on purpose, leaves a store that verify accepts with exactly
the right bytes, or makes verify fail and name the place. There is no silent case. The table is printed.
"""

import os
from contextlib import suppress
from pathlib import Path

import helpers_mutations_files
import helpers_mutations_writing
import numpy as np
import pytest
from helpers_damage import everything, same, sealed_files
from helpers_mutations import MODES, NOT_HERE, REGISTRY, TABLE, Mutation, Scene, judge, row_text, twin_of
from nearline.store import NearlineError, StoreNotFound
from nearline.store.places import LocalPlace, OpenFile
from nearline.store.verify import verify

REGISTERED_BY = (helpers_mutations_files, helpers_mutations_writing)


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of these stores has to survive a real power cut."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return twin_of(tmp_path_factory.mktemp("twin"))


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(found, marks=[pytest.mark.long] if found.long else [], id=f"{found.mode}: {found.name}")
        for found in REGISTRY
    ],
)
def test_no_failure_is_silent(
    mutation: Mutation, twin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(judge(mutation, Scene(twin, tmp_path, monkeypatch)))


class Part(LocalPlace):
    """A folder of which only some files have arrived."""

    def __init__(self, path: Path, arrived: set[str]) -> None:
        super().__init__(path)
        self.arrived = arrived

    def open(self, name: str) -> OpenFile:
        if name not in self.arrived:
            raise FileNotFoundError(name)
        return super().open(name)

    def size(self, name: str) -> int | None:
        return super().size(name) if name in self.arrived else None

    def list(self, prefix: str = "") -> dict[str, int] | None:
        found = super().list(prefix) or {}
        return {name: size for name, size in found.items() if name in self.arrived}


def check_prefixes(twin: Path, every: bool) -> int:
    """Copies in 50 random orders and in that of a push, cut off: each is refused, and says what it lacks."""
    rng, names, n_checked = np.random.default_rng(0), sealed_files(twin), 0
    right = everything(twin)
    last = {"manifest.json": 3, "SEALED": 4}
    ordered = sorted(names, key=lambda name: last.get(name, 1 if name.startswith("blocks/") else 0))
    for order in [ordered, *(rng.permutation(names).tolist() for _ in range(50))]:
        whole = verify(Part(twin, set(order)))
        assert whole.problems == ()
        cuts = range(len(order)) if every else rng.integers(len(order), size=2).tolist()
        for n_arrived in cuts:
            arrived = set(order[:n_arrived])
            place = Part(twin, arrived)
            with suppress(NearlineError):  # or nothing that was asked for is missing
                assert same(everything(place), right)
            try:
                found = verify(place)
            except StoreNotFound:
                assert not arrived & {"SEALED", "manifest.json", "plan.json", "activations.zarr/zarr.json"}
            else:
                assert found.exit_code in (1, 3)
                assert not {problem.file for problem in found.problems} & arrived - {"manifest.json"}
                if order is ordered:
                    assert found.exit_code == 3 or "manifest.json" not in arrived
            n_checked += 1
    return n_checked


def test_a_copy_in_any_order_cut_anywhere_is_never_whole(twin: Path) -> None:
    print(f"12  {check_prefixes(twin, every=False)} copies cut short: none is taken for whole")


@pytest.mark.long
def test_a_copy_in_any_order_cut_everywhere_is_never_whole(twin: Path) -> None:
    print(f"12  {check_prefixes(twin, every=True)} copies cut short: none is taken for whole")


def test_every_mode_is_injected_and_the_table_says_what_came_of_it() -> None:
    for row in sorted(TABLE):
        print(row_text(row))
    for mode, reason in NOT_HERE.items():
        print(f"{mode:>2}  elsewhere or not at all: {reason}")
    injected = {mutation.mode for mutation in REGISTRY if not mutation.long}
    assert injected == set(MODES)
