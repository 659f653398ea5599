"""Mutations of the files of a whole store: cuts, flips, swaps, losses, copies, places that misbehave."""

import errno
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from helpers_damage import cut, edit_json, extend, flip, remanifest, sealed_files, swap, vouch
from helpers_mutations import DATA, SETTINGS, Accepted, Found, Outcome, Raised, Scene, mutation, twin_of
from helpers_store import synthetic
from nearline.store import EnvironmentFault
from nearline.store.layout import TOKEN_COLUMNS
from nearline.store.places import LocalPlace, OpenFile
from nearline.store.records import record_name
from nearline.store.verify import verify

GROUP = "activations.zarr"
ROOT = f"{GROUP}/zarr.json"
SITE_CHUNKS = [f"residual/c/{i}/{b}/0" for i in range(2) for b in range(3)]
CHUNKS = [  # one of each array, all blocks
    *SITE_CHUNKS[3:],
    "mlp_output/c/0/1/0",
    "embedding/c/2/0",
    *(f"{name}/c/1" for name in TOKEN_COLUMNS),
]
FEW = ["residual/c/1/2/0", "embedding/c/2/0", "token_id/c/1", "nll/c/1"]
MORE = [key for key in CHUNKS if key not in FEW]
METADATA = [
    "SEALED",
    "manifest.json",
    "plan.json",
    "documents.parquet",
    "vocabulary.parquet",
    ROOT,
    *(f"{GROUP}/{name}/zarr.json" for name in ("residual", "mlp_output", "embedding", *TOKEN_COLUMNS)),
    *(f"{GROUP}/{name}/zarr.json" for name in ("layer", "norm_weight", "norm_bias", "position_embedding")),
    f"{GROUP}/layer/c/0",
    *(f"{GROUP}/{name}/c/0/0" for name in ("norm_weight", "norm_bias", "position_embedding")),
    *(record_name(block) for block in range(3)),
]


def place_of_chunk(key: str) -> dict[str, Any]:
    """What a problem of this chunk object must name."""
    array, _, *index = key.split("/")
    block = int(index[-2] if array in ("residual", "mlp_output", "embedding") else index[0])
    layer = SETTINGS["layers"][int(index[0])] if array in ("residual", "mlp_output") else None
    row0, row1 = DATA.plan.block_range(block)
    return {"file": f"{GROUP}/{key}", "array": array, "layer": layer, "tokens": (row0, row1 - 1)}


# 6, 7: sizes; found without reading any content

CUTS: dict[str, Callable[[Path], object]] = {
    "cut to 1 byte": lambda path: cut(path, 1),
    "cut to half": lambda path: cut(path, path.stat().st_size // 2),
    "cut by 1 byte": lambda path: cut(path, -1),
    "4 bytes too many": extend,
}


@mutation(6, "{0}: {1}", [(key, how) for key in MORE for how in CUTS], long=True)
@mutation(6, "{0}: {1}", [(key, how) for key in FEW for how in CUTS])
def cut_chunk(scene: Scene, what: tuple[str, str]) -> Outcome:
    CUTS[what[1]](scene.store / GROUP / what[0])
    return Found(**place_of_chunk(what[0]), level="quick")


@mutation(6, "metadata cut by 1 byte: {}", METADATA)
def cut_metadata(scene: Scene, name: str) -> Outcome:
    cut(scene.store / name, -1)
    return Found(name, level="quick")


@mutation(7, "zero-length: {}", MORE, long=True)
@mutation(7, "zero-length: {}", FEW)
def empty_chunk(scene: Scene, key: str) -> Outcome:
    cut(scene.store / GROUP / key, 0)
    return Found(**place_of_chunk(key), level="quick")


@mutation(7, "zero-length metadata: {}", METADATA)
def empty_metadata(scene: Scene, name: str) -> Outcome:
    cut(scene.store / name, 0)
    return Found(name, level="quick")


# 8: content

BITS: dict[str, Callable[[int], int]] = {
    "first bit": lambda n_bits: 0,
    "middle bit": lambda n_bits: n_bits // 2 + 3,
    "bit of the checksum": lambda n_bits: n_bits - 9,
}


@mutation(8, "{0}: {1}", [(key, how) for key in MORE for how in BITS], long=True)
@mutation(8, "{0}: {1}", [(key, how) for key in FEW for how in BITS])
def flip_chunk(scene: Scene, what: tuple[str, str]) -> Outcome:
    path = scene.store / GROUP / what[0]
    flip(path, BITS[what[1]](path.stat().st_size * 8))
    return Found(**place_of_chunk(what[0]))


SWAPS = {
    "blocks": ("residual/c/1/0/0", "residual/c/1/1/0"),
    "layers": ("residual/c/0/1/0", "residual/c/1/1/0"),
    "sites": ("residual/c/1/1/0", "mlp_output/c/1/1/0"),
    "a site and the embedding": ("residual/c/1/1/0", "embedding/c/1/0"),
    "blocks of a column": ("token_id/c/0", "token_id/c/1"),
    "columns": ("token_id/c/1", "target_id/c/1"),
    "columns of another dtype": ("nll/c/1", "position/c/1"),
}


@mutation(8, "swapped chunks, between {}", SWAPS)
def swap_chunks(scene: Scene, name: str) -> Outcome:
    one, other = SWAPS[name]
    swap(scene.store / GROUP / one, scene.store / GROUP / other)
    found = verify(scene.store, level="full")
    assert {problem.file for problem in found.problems} == {f"{GROUP}/{one}", f"{GROUP}/{other}"}
    return Found(**place_of_chunk(one))


@mutation(8, "three chunks in a ring")
def ring(scene: Scene) -> Outcome:
    for block in (1, 2):
        swap(scene.store / GROUP / "mlp_output/c/0/0/0", scene.store / GROUP / f"mlp_output/c/0/{block}/0")
    assert len(verify(scene.store, level="full").problems) == 3
    return Found(**place_of_chunk("mlp_output/c/0/2/0"))


@mutation(8, "a chunk of another store: {}", ["residual/c/1/1/0", "token_id/c/1", "nll/c/1"])
def chunk_of_another_store(scene: Scene, key: str) -> Outcome:
    other = twin_of(scene.tmp / "other", synthetic(**SETTINGS, seed=1))
    shutil.copy(other / GROUP / key, scene.store / GROUP / key)
    return Found(**place_of_chunk(key))


@mutation(8, "an older version of a chunk, as a broken mirror keeps it")
def older_chunk(scene: Scene) -> Outcome:
    """Whole, self-consistent, right place, right size: only the digest knows."""
    path = scene.store / GROUP / "residual/c/1/1/0"
    values = np.frombuffer(path.read_bytes()[:-4], "<f2") + np.float16(0.5)
    body = values.astype("<f2").tobytes()
    path.write_bytes(body + int(google_crc32c.value(body)).to_bytes(4, "little"))
    return Found(**place_of_chunk("residual/c/1/1/0"))


@mutation(8, "small arrays swapped")
def swap_whole(scene: Scene) -> Outcome:
    swap(scene.store / GROUP / "norm_weight/c/0/0", scene.store / GROUP / "norm_bias/c/0/0")
    return Found(f"{GROUP}/norm_weight/c/0/0")


# 9: metadata


@mutation(9, "{0}: a bit at {1}/6", [(name, part) for name in METADATA for part in (0, 1, 6)], long=True)
@mutation(9, "{0}: a bit at {1}/6", [(name, part) for name in METADATA for part in (3,)])
def flip_metadata(scene: Scene, what: tuple[str, int]) -> Outcome:
    name, part = what
    path = scene.store / name
    flip(path, int(part / 6 * (path.stat().st_size * 8 - 1)))
    found = verify(scene.store, level="full")
    assert {problem.file for problem in found.problems} == {name}  # nothing else is blamed
    return Found(name)


@mutation(9, "every 9th byte of SEALED in turn")
def flip_seal(scene: Scene) -> Outcome:
    path = scene.store / "SEALED"
    for byte in range(0, path.stat().st_size, 9):
        flip(path, byte * 8 + byte % 8)
        found = verify(scene.store)
        assert {problem.file for problem in found.problems} == {"SEALED"}
        flip(path, byte * 8 + byte % 8)
    flip(path, 0)
    return Found("SEALED")


@mutation(9, "every byte of {} in turn", METADATA, long=True)
def flip_each_byte(scene: Scene, name: str) -> Outcome:
    path = scene.store / name
    for byte in range(path.stat().st_size):
        flip(path, byte * 8 + byte % 8)
        found = verify(scene.store)
        assert {problem.file for problem in found.problems} == {name}
        flip(path, byte * 8 + byte % 8)
    flip(path, 3)
    return Found(name)


@mutation(9, "a record edited to vouch for other bytes")
def record_vouches(scene: Scene) -> Outcome:
    shutil.copy(scene.store / GROUP / "residual/c/0/1/0", scene.store / GROUP / "residual/c/1/1/0")
    vouch(scene.store, "residual/c/1/1/0")
    return Found("blocks/000001.json", tokens=(12, 23))


@mutation(9, "a manifest edited to vouch for that record, without SEALED")
def manifest_vouches(scene: Scene) -> Outcome:
    record_vouches(scene)
    remanifest(scene.store)
    return Found("manifest.json")


@mutation(9, "two block records swapped")
def swap_records(scene: Scene) -> Outcome:
    swap(scene.store / "blocks/000000.json", scene.store / "blocks/000001.json")
    return Found("blocks/000001.json", tokens=(12, 23))


@mutation(9, "metadata of two arrays swapped")
def swap_array_metadata(scene: Scene) -> Outcome:
    swap(scene.store / GROUP / "nll/zarr.json", scene.store / GROUP / "token_id/zarr.json")
    return Found(f"{GROUP}/nll/zarr.json")


@mutation(9, "{} of another store", ["SEALED", "manifest.json", "plan.json", "blocks/000001.json", ROOT])
def metadata_of_another_store(scene: Scene, name: str) -> Outcome:
    other = twin_of(scene.tmp / "other", synthetic(**SETTINGS, seed=1))
    shutil.copy(other / name, scene.store / name)
    return Found("manifest.json" if name == "SEALED" else name)


@mutation(9, "SEALED and manifest of another store")
def seal_of_another_store(scene: Scene) -> Outcome:
    other = twin_of(scene.tmp / "other", synthetic(**SETTINGS, seed=1))
    for name in ("SEALED", "manifest.json"):
        shutil.copy(other / name, scene.store / name)
    return Found("plan.json")


@mutation(9, "a value edited in place: {}", ["n_tokens", "seed"])
def edit_plan(scene: Scene, key: str) -> Outcome:
    edit_json(scene.store / "plan.json", lambda data: data.update({key: data[key] + 1}))
    return Found("plan.json")


# 10: missing


@mutation(10, "missing: {}", MORE, long=True)
@mutation(10, "missing: {}", FEW)
def missing_chunk(scene: Scene, key: str) -> Outcome:
    (scene.store / GROUP / key).unlink()
    return Found(**place_of_chunk(key), level="quick")


@mutation(10, "missing metadata: {}", [name for name in METADATA if name != "SEALED"])
def missing_metadata(scene: Scene, name: str) -> Outcome:
    (scene.store / name).unlink()
    return Found(name, level="quick")


@mutation(10, "missing: SEALED")
def missing_seal(scene: Scene) -> Outcome:
    (scene.store / "SEALED").unlink()
    return Found("SEALED", incomplete=True)


@mutation(10, "a whole layer is missing")
def missing_layer(scene: Scene) -> Outcome:
    shutil.rmtree(scene.store / GROUP / "residual/c/1")
    assert len(verify(scene.store).problems) == 3
    return Found(array="residual", layer=5, tokens=(24, 34), level="quick")


class Odd(LocalPlace):
    """A place that answers one file's requests in its own way."""

    def __init__(self, path: Path, name: str, answer: Callable[[OpenFile], OpenFile], listed: bool) -> None:
        super().__init__(path)
        self._name, self._answer, self._listed = name, answer, listed

    def open(self, name: str) -> OpenFile:
        file = super().open(name)
        return self._answer(file) if name == self._name else file

    def size(self, name: str) -> int | None:
        if name == self._name and not self._listed:
            return None
        return super().size(name)

    def list(self, prefix: str = "") -> dict[str, int] | None:
        return super().list(prefix) if self._listed else None


class Portion:
    """An opened file that misbehaves while it is read."""

    def __init__(self, file: OpenFile, readinto: Callable[[memoryview], int]) -> None:
        self.size, self._file, self._readinto = file.size, file, readinto

    def readinto(self, view: memoryview) -> int:
        return self._readinto(view)

    def close(self) -> None:
        self._file.close()


def raising(error: Exception) -> Callable[[OpenFile], OpenFile]:
    def answer(file: OpenFile) -> OpenFile:
        file.close()
        raise error

    return answer


def ending(file: OpenFile) -> OpenFile:
    left = [file.size // 2]

    def readinto(view: memoryview) -> int:
        n_read = file.readinto(view[: left[0]]) if left[0] else 0
        left[0] -= n_read
        return n_read

    return Portion(file, readinto)


def login_page(file: OpenFile) -> OpenFile:
    def readinto(view: memoryview) -> int:
        view[:] = (b"<html>Please log in</html>" * (len(view) // 8 + 1))[: len(view)]
        return len(view)

    return Portion(file, readinto)


def failing_read(number: int) -> Callable[[OpenFile], OpenFile]:
    def readinto(view: memoryview) -> int:
        raise OSError(number, os.strerror(number))

    return lambda file: Portion(file, readinto)


KEY = "residual/c/1/1/0"


@mutation(10, "the server answers 404, listed or not: {}", ["listed", "not listed"])
def not_found(scene: Scene, how: str) -> Outcome:
    answer = raising(FileNotFoundError("404"))
    place = Odd(scene.store, f"{GROUP}/{KEY}", answer, how == "listed")
    return Found(**place_of_chunk(KEY), place=place)


@mutation(10, "the server answers 403 for one chunk")
def forbidden(scene: Scene) -> Outcome:
    place = Odd(scene.store, f"{GROUP}/{KEY}", raising(EnvironmentFault("403: no access")), True)
    with pytest.raises(EnvironmentFault, match="403"):
        verify(place, level="full")
    return Raised("EnvironmentFault, never called damage or whole")


# 11: consolidated metadata


def with_zarr(store: Path, change: Callable[[Any], object]) -> None:
    import zarr

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        change(zarr.open_group(store / GROUP, mode="r+", use_consolidated=False))


@mutation(11, "an array resized through zarr")
def resized(scene: Scene) -> Outcome:
    with_zarr(scene.store, lambda group: group["nll"].resize((40,)))
    return Found(f"{GROUP}/nll/zarr.json", level="quick")


@mutation(11, "an array deleted through zarr")
def deleted(scene: Scene) -> Outcome:
    with_zarr(scene.store, lambda group: group.__delitem__("norm_bias"))
    return Found(f"{GROUP}/norm_bias/zarr.json", level="quick")


@mutation(11, "an array added through zarr")
def added(scene: Scene) -> Outcome:
    with_zarr(scene.store, lambda group: group.create_array("mine", shape=(3,), dtype="f4"))
    return Found(f"{GROUP}/mine/zarr.json", level="quick")


@mutation(11, "attributes edited through zarr")
def attributes_edited(scene: Scene) -> Outcome:
    with_zarr(scene.store, lambda group: group.attrs.update(note="mine"))
    return Found(ROOT, level="quick")


@mutation(11, "consolidated again by another program, after a resize")
def consolidated_again(scene: Scene) -> Outcome:
    import zarr

    resized(scene)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(scene.store / GROUP)
    return Found(ROOT, level="quick")


@mutation(11, "values written through zarr")
def written(scene: Scene) -> Outcome:
    with_zarr(scene.store, lambda group: group["residual"].__setitem__((1, slice(12, 24)), 0))
    return Found(**place_of_chunk(KEY))


# 12: copies; the orders themselves are in the test


@mutation(
    12, "the copy stopped before SEALED, {}", ["one chunk short", "one record short", "whole otherwise"]
)
def copy_without_seal(scene: Scene, how: str) -> Outcome:
    (scene.store / "SEALED").unlink()
    gone = {"one chunk short": f"{GROUP}/{KEY}", "one record short": "blocks/000001.json"}.get(how)
    if gone:
        (scene.store / gone).unlink()
    return Found(gone or "SEALED", incomplete=True)


@mutation(12, "SEALED came first, {} never came", [f"{GROUP}/{KEY}", "blocks/000001.json", "manifest.json"])
def copy_with_seal(scene: Scene, name: str) -> Outcome:
    (scene.store / name).unlink()
    return Found(name)


@mutation(12, "two stores copied into one folder")
def two_stores(scene: Scene) -> Outcome:
    other = twin_of(scene.tmp / "other", synthetic(**SETTINGS, seed=1))
    for name in sealed_files(other)[::2]:
        shutil.copy(other / name, scene.store / name)
    return Found(f"{GROUP}/embedding/c/0/0")


@mutation(12, "the copy brought everything, and the times of today")
def plain_copy(scene: Scene) -> Outcome:
    return Accepted(Path(shutil.copytree(scene.store, scene.tmp / "copy" / "store")))


# 14: times of files


@mutation(14, "file times {} away", ["2 hours", "-2 hours", "30 years", "-50 years"])
def file_times(scene: Scene, shift: str) -> Outcome:
    number, unit = shift.split()
    seconds = int(number) * {"hours": 3600, "years": 31_557_600}[unit]
    for path in scene.store.rglob("*"):
        now = path.stat().st_mtime
        os.utime(path, (now, now + seconds))
    return Accepted(scene.store)


# 17, 18: places that misbehave


@mutation(17, "a body that ends at half: {}", [f"{GROUP}/{KEY}", "blocks/000001.json"])
def short_body(scene: Scene, name: str) -> Outcome:
    return Found(name, place=Odd(scene.store, name, ending, True))


@mutation(17, "a login page with status 200, the right length: {}", [f"{GROUP}/{KEY}", "plan.json"])
def page(scene: Scene, name: str) -> Outcome:
    return Found(name, place=Odd(scene.store, name, login_page, True))


@mutation(17, "503 for good on {}", [f"{GROUP}/{KEY}", "blocks/000001.json", "SEALED", "documents.parquet"])
def unavailable(scene: Scene, name: str) -> Outcome:
    place = Odd(scene.store, name, raising(EnvironmentFault(f"{name}: 503 Slow Down")), True)
    with pytest.raises(EnvironmentFault, match="503"):
        verify(place, level="full")
    return Raised("EnvironmentFault, never called damage or whole")


@mutation(18, "the disk cannot read one file (EIO)")
def bad_sector(scene: Scene) -> Outcome:
    answer = failing_read(errno.EIO)
    return Found(**place_of_chunk(KEY), place=Odd(scene.store, f"{GROUP}/{KEY}", answer, True))


@mutation(18, "a stale file handle (ESTALE)")
def stale(scene: Scene) -> Outcome:
    place = Odd(scene.store, f"{GROUP}/{KEY}", failing_read(errno.ESTALE), True)
    with pytest.raises(EnvironmentFault, match=r"[Ss]tale"):
        verify(place, level="full")
    return Raised("EnvironmentFault, never called damage or whole")


@mutation(18, "a listing that is late: the file is there and not listed")
def late_listing(scene: Scene) -> Outcome:
    class Late(LocalPlace):
        def list(self, prefix: str = "") -> dict[str, int] | None:
            found = super().list(prefix)
            return None if found is None else {k: v for k, v in found.items() if not k.endswith(KEY)}

    assert verify(Late(scene.store), level="full").problems == ()
    return Accepted(scene.store)


@mutation(18, "an array's folder is a link to another disk")
def linked(scene: Scene) -> Outcome:
    store = Path(shutil.copytree(scene.twin, scene.tmp / "store"))
    shutil.move(store / GROUP / "residual", scene.tmp / "elsewhere")
    (store / GROUP / "residual").symlink_to(scene.tmp / "elsewhere")
    assert verify(store, level="full").problems == ()
    shutil.rmtree(scene.tmp / "elsewhere" / "c" / "1" / "1")
    return Found(**place_of_chunk(KEY), path=store)
