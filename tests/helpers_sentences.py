"""What every refusal of the command line looks like: one sentence, an exit code, no traceback."""

import re


def assert_one_sentence(error: str, got: int, code: int, words: list[str]) -> None:
    assert got == code, error
    assert "Traceback" not in error
    last = error.strip().splitlines()[-1]
    assert last.startswith("nearline: ")
    assert last.count("nearline: ") == 1
    assert len(last) < 600, last
    assert not re.search(r"[.?!:;,]\. |  ", last), last
    for word in words:
        assert word in last, last
