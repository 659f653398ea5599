"""The contract of a Place as classes of tests: what reads subclasses the first, what writes the second too.

In: the fixtures `place`, which holds FILES, and `empty`, an empty writable place. Out: the promises of
store/places.py, tried. A new kind of place costs two fixtures.
"""

import pickle
from pathlib import Path
from typing import Any

import pytest
from helpers_servers import SECRET_KEY
from nearline.store.errors import FormatError, UsageError

FILES = {
    "SEALED": b"x" * 129,
    "blocks/000000.json": b'{"a": 1}',
    "blocks/000001.json": b'{"b": 22}',
    "blocks.txt": b"not a block",
    "activations.zarr/c/0/0 1/é+%.bin": bytes(range(256)) * 700,
    "empty": b"",
}


def read_all(place: Any, name: str, step: int = 1000) -> bytes:
    """The content through `open`, in small steps."""
    file = place.open(name)
    try:
        content, view = b"", memoryview(bytearray(step))
        while n := file.readinto(view):
            content += view[:n]
        assert len(content) == file.size
        return content
    finally:
        file.close()


class ReadingContract:
    """Takes the fixture `place`, which holds FILES."""

    def test_a_file_is_read_whole_or_in_steps(self, place: Any) -> None:
        for name, content in FILES.items():
            assert place.read(name) == content
            assert read_all(place, name) == content
            assert place.size(name) == len(content)

    def test_an_absent_file_is_named(self, place: Any) -> None:
        for name in ("blocks/000009.json", "none/none"):
            assert place.size(name) is None
            with pytest.raises(FileNotFoundError, match=name):
                place.open(name)
            with pytest.raises(FileNotFoundError, match=name):
                place.read(name)

    def test_a_file_over_the_limit_is_refused(self, place: Any) -> None:
        assert place.read("SEALED", limit=129)
        with pytest.raises(FormatError, match=r"SEALED.*129 bytes, at most 128"):
            place.read("SEALED", limit=128)

    def test_all_files_are_listed_or_none(self, place: Any) -> None:
        found = place.list()
        if found is None:
            assert place.list("blocks/") is None
            return
        assert found == {name: len(content) for name, content in FILES.items()}
        assert set(place.list("blocks/")) == {"blocks/000000.json", "blocks/000001.json"}
        assert set(place.list("blocks/000001")) == {"blocks/000001.json"}
        assert set(place.list("blocks")) == {"blocks/000000.json", "blocks/000001.json", "blocks.txt"}
        assert place.list("none/") == {}

    def test_messages_name_place_and_file(self, place: Any) -> None:
        assert place.where("SEALED") == f"{place.url}/SEALED"

    def test_a_pickled_place_is_its_url(self, place: Any) -> None:
        blob = pickle.dumps(place)
        assert SECRET_KEY.encode() not in blob
        again = pickle.loads(blob)
        assert again.url == place.url
        assert again.read("SEALED") == FILES["SEALED"]


class WritingContract(ReadingContract):
    """Takes `empty`, an empty writable place, too."""

    def test_what_was_put_is_there(self, empty: Any, tmp_path: Path) -> None:
        source = tmp_path / "source.bin"
        source.write_bytes(bytes(range(256)) * 40)
        empty.put("a/b", b"first")
        empty.put("a/b", b"second")
        empty.put("a/c", source)
        empty.put("none", b"")
        assert empty.read("a/b") == b"second"
        assert empty.read("a/c") == source.read_bytes()
        assert empty.list() == {"a/b": 6, "a/c": 10240, "none": 0}

    def test_create_never_replaces(self, empty: Any) -> None:
        assert empty.create("one", b"first")
        assert not empty.create("one", b"other")
        assert not empty.create("one", b"second")
        assert empty.read("one") == b"first"

    def test_delete_twice(self, empty: Any) -> None:
        empty.put("a/b", b"x")
        empty.delete("a/b")
        empty.delete("a/b")
        assert empty.size("a/b") is None
        assert empty.create("a/b", b"new")


class RemoteNames:
    """Of places that are not folders: a name never leaves its place."""

    @pytest.mark.parametrize("name", ["../x", "a/../../x", "/x", "a//b", "", ".", "a\\b", "a/\n", "a/"])
    def test_names_that_leave_the_place_are_refused(self, place: Any, name: str) -> None:
        for ask in (place.open, place.read, place.size):
            with pytest.raises(UsageError, match="not the name of a file"):
                ask(name)
        if hasattr(place, "put"):
            for write in (place.put, place.create):
                with pytest.raises(UsageError, match="not the name of a file"):
                    write(name, b"1")
            with pytest.raises(UsageError, match="not the name of a file"):
                place.delete(name)
