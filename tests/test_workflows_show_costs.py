"""The tables that `measure` prints: the headings say what stands in brackets."""

from typing import Any

import pytest
from nearline.workflows.show_costs import costs


class Measured:
    """What of a study is shown: its table of interventions."""

    path = "study"

    def table(self, name: str) -> Any:
        assert name == "interventions"
        return self

    def to_pylist(self) -> list[dict[str, Any]]:
        same = {"store": "s", "sequence_length": 512, "name": "linear", "linear_share": 1.0}
        changes = ((3.0, 2.9, 3.1), (1.0, 0.9, 1.1), (2.0, 1.9, 2.1))
        keys = ("ppl_pct", "ppl_lo", "ppl_hi")
        ones = [
            same
            | {"chosen": "one", "layers": f"{layer}", "verdict": "supported"}
            | dict(zip(keys, found, strict=True))
            for layer, found in enumerate(changes)
        ]
        joint = {"chosen": "given", "layers": "0,2", "verdict": "supported"}
        return [*ones, same | joint | dict(zip(keys, (17.3, 15.74, 18.97), strict=True))]


def test_a_range_over_layers_and_an_interval_have_headings_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    costs(Measured(), as_json=False)  # pyright: ignore[reportArgumentType]
    lines = capsys.readouterr().out.splitlines()
    for heading, shown in (
        ("perplexity: median (range) over layers", "+2.00 % (+1.00 to +3.00)"),
        ("perplexity [95 % interval]", "+17.30 % [+15.74, +18.97]"),
    ):
        at = next(index for index, line in enumerate(lines) if heading in line)
        assert lines[at + 1][lines[at].index(heading) :].startswith(shown)
