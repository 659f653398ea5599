"""docs/tables.md names every table and every column of it, and no table that is not written."""

import re
from pathlib import Path

import pytest
from nearline.analyze.analysis_tables import ANALYSIS_SCHEMAS
from nearline.analyze.results import SCHEMAS

PAGE = (Path(__file__).parent.parent / "docs" / "tables.md").read_text(encoding="utf-8")
SECTIONS = dict(zip(*[iter(re.split(r"^### (\w+)\n", PAGE, flags=re.MULTILINE)[1:])] * 2, strict=True))
COMMON = PAGE.partition("## What")[0]
TABLES = {**SCHEMAS, **ANALYSIS_SCHEMAS}


def test_every_table_has_its_section_in_the_order_of_the_schemas() -> None:
    assert list(SECTIONS) == list(TABLES)


@pytest.mark.parametrize("table", TABLES)
def test_every_column_is_explained(table: str) -> None:
    words = set(re.findall(r"`([^`]+)`", COMMON + SECTIONS[table]))
    assert not set(TABLES[table].names) - words
