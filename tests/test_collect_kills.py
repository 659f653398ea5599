"""kill -9 at any moment of a harvest: the store never passes for whole, and the same command completes it to
the very bytes of a run that nobody disturbed."""

import random
from collections import Counter
from pathlib import Path

import pytest
from helpers_kills import Forge, Outcome, store_files, the_forge
from nearline.store import Reader
from nearline.store.errors import NearlineError
from nearline.store.points import POINTS

# What a harvest passes; the other named points belong to repairs, shortening and transfer.
FIRST_POINTS = (
    "durable.written",
    "durable.half_renamed",
    "durable.created",
    "writer.root_begun",
    "writer.chunks_durable",
    "writer.record_created",
    "sealing.manifest_written",
)


@pytest.fixture(scope="module")
def forge() -> Forge:
    return the_forge()


class Calm:
    """The undisturbed run: its files, the points it passed, how long it went on after its first record."""

    def __init__(self, forge: Forge, folder: Path) -> None:
        self.outcome = forge.run(path=str(folder / "calm"))
        assert self.outcome.code == 0, self.outcome.message
        self.files = store_files(folder / "calm")


@pytest.fixture(scope="module")
def calm(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    return Calm(forge, tmp_path_factory.mktemp("calm"))


def check_in_between(path: Path, calm: Calm) -> int:
    """What is committed is right, and nothing poses as whole. Returns how many blocks are committed."""
    if (path / "SEALED").exists():
        found = {name: content for name, content in store_files(path).items() if ".partial" not in name}
        assert found == calm.files
        return -1
    with pytest.raises(NearlineError):
        Reader.open(path)
    records = sorted((path / "blocks").glob("*.json"))
    for file in records:
        name = f"blocks/{file.name}"
        assert file.read_bytes() == calm.files[name]
        block = int(file.stem)
        for key, content in calm.files.items():
            parts = key.split("/")
            if key.startswith("activations.zarr/") and "c" in parts and _block_of(parts) == block:
                assert (path / key).read_bytes() == content, key
    return len(records)


def _block_of(parts: list[str]) -> int | None:
    """The block in a chunk's key, NAME/c/LAYER/BLOCK/0 or NAME/c/BLOCK[/0]; None for the small arrays."""
    name, index = parts[1], parts[3:]
    if name in ("layer", "position_embedding") or name.startswith(("norm_", "post_norm_")):
        return None
    return int(index[1] if name.startswith(("residual", "mlp_output")) else index[0])


def kill_and_resume(forge: Forge, calm: Calm, path: Path, **how: object) -> tuple[Outcome, int]:
    killed = forge.run(path=str(path), **how)
    n_committed = check_in_between(path, calm) if path.exists() else 0
    again = forge.run(path=str(path))
    assert again.code == 0, again.message
    assert store_files(path) == calm.files, "nothing is left over either"
    return killed, n_committed


def killed_runs(forge: Forge, calm: Calm, folder: Path, points: list[str], n_random: int, seed: int) -> str:
    """Kill a run at each of `points` (at a random one of its visits), and `n_random` at random moments."""
    rng, struck, committed = random.Random(seed), Counter[str](), Counter[int]()
    for number, point in enumerate(points):
        nth = rng.randint(1, calm.outcome.points[point])
        killed, n = kill_and_resume(forge, calm, folder / f"point-{number}", kill_at=(point, nth))
        assert killed.killed, f"{point} {nth}: {killed}"
        struck[point] += 1
        committed[n] += 1
    span, tries = calm.outcome.seconds_after_record, 0
    while struck["random moment"] < n_random:
        tries += 1
        assert tries <= 5 * n_random, "runs end before they can be killed"
        delay = rng.random() * span
        killed, n = kill_and_resume(forge, calm, folder / f"random-{tries}", kill_after_s=delay)
        if not killed.killed:  # it was faster this time
            span = max(span * 0.8, 0.001)
            continue
        struck["random moment"] += 1
        committed[n] += 1
    n_blocks = ", ".join(f"{n}: {committed[n]}" for n in sorted(committed))
    return (
        f"{sum(struck.values())} runs killed ({struck['random moment']} at random moments, the others at "
        f"{len(struck) - bool(n_random)} named points), each resumed to the same bytes; "
        f"blocks committed at the kill (-1: sealed): {n_blocks}"
    )


def test_ten_killed_runs_resume_to_the_same_bytes(forge: Forge, calm: Calm, tmp_path: Path) -> None:
    assert set(FIRST_POINTS) <= set(calm.outcome.points)
    summary = killed_runs(forge, calm, tmp_path, list(FIRST_POINTS), 3, seed=1)
    print(summary)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_hundred_killed_runs_resume_to_the_same_bytes(forge: Forge, calm: Calm, tmp_path: Path) -> None:
    reached = [point for point in POINTS if point in calm.outcome.points]
    points = (reached * 60)[:60]
    summary = killed_runs(forge, calm, tmp_path, points, 40, seed=2)
    print(summary)


@pytest.mark.long
def test_a_run_killed_again_and_again_gets_there(forge: Forge, calm: Calm, tmp_path: Path) -> None:
    rng = random.Random(3)
    for number in range(10):
        path, n_kills = tmp_path / str(number), 0
        while not (path / "SEALED").exists():
            nth = rng.randint(1, 12)
            outcome = forge.run(path=str(path), kill_at=(rng.choice(FIRST_POINTS[:6]), nth))
            n_kills += outcome.killed
            check_in_between(path, calm)
        assert {name: one for name, one in store_files(path).items() if ".partial" not in name} == calm.files


def test_every_point_of_collecting_and_sealing_is_passed(calm: Calm) -> None:
    wanted = {point for point in POINTS if point.startswith(("writer.", "sealing.", "durable."))}
    assert wanted <= set(calm.outcome.points)
