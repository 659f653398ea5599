"""docs/tables.md names every table and every column of it, and no table that is not written."""

import re
from pathlib import Path

import pytest
from nearline.analyze.analysis_tables import ANALYSIS_SCHEMAS
from nearline.analyze.budget_tables import BUDGET_SCHEMAS
from nearline.analyze.cost_tables import COST_SCHEMAS
from nearline.analyze.estimate_checks import ESTIMATE_SCHEMAS
from nearline.analyze.finetune_tables import FINETUNE_SCHEMAS
from nearline.analyze.results import SCHEMAS

PAGE = (Path(__file__).parent.parent / "docs" / "tables.md").read_text(encoding="utf-8")
SECTIONS = dict(zip(*[iter(re.split(r"^### (\w+)\n", PAGE, flags=re.MULTILINE)[1:])] * 2, strict=True))
COMMON = PAGE.partition("## What")[0] + "".join(
    PAGE.partition(f"## What `{step}` writes")[2].partition("###")[0] for step in ("measure", "finetune")
)
MEASURED = {**COST_SCHEMAS, **ESTIMATE_SCHEMAS, **BUDGET_SCHEMAS}
TABLES = {**SCHEMAS, **ANALYSIS_SCHEMAS, **MEASURED, **FINETUNE_SCHEMAS}


def test_every_table_has_its_section_in_the_order_of_the_schemas() -> None:
    assert list(SECTIONS) == list(TABLES)


@pytest.mark.parametrize("table", TABLES)
def test_every_column_is_explained(table: str) -> None:
    words = set(re.findall(r"`([^`]+)`", COMMON + SECTIONS[table]))
    assert not set(TABLES[table].names) - words
