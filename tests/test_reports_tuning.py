"""The section of a fine-tuning: there where one was run, claims as strong as verdicts, strings stay text."""

import re
from typing import Any

import pytest
from helpers_reports import make_results, make_tables
from helpers_reports_pages import HOSTILE, Structure, draw_nothing, figures, plain
from nearline.analyze.finetune_tables import FINETUNE_SCHEMAS
from nearline.reports import page, tuning_section
from nearline.reports.tuning_columns import TUNING_COLUMNS

STORES = ("gpt2-python", "gpt2-scientific")
ARMS = ("base", "control", "control_matched", "linear", "gated")
PAIRS = (("linear", "base"), ("linear", "control_matched"), ("linear", "control"), ("gated", "linear"))
VERDICT = "cannot tell"


def everything(verdict: str = VERDICT, stores: tuple[str, ...] = STORES) -> dict[str, list[dict[str, Any]]]:
    """Two seeds, two points; `linear` lies 2 % above its control."""
    where = [(store, seed) for store in stores for seed in (0, 1)]
    points = [
        {
            "arm": arm,
            "seed": seed,
            "learning_rate": 1e-4,
            "chosen": True,
            "phase": 1,
            "step": step,
            "tokens_seen": 1000 * step,
            "distinct_tokens": 900 * step,
            "store": store,
            "split": "test",
            "n_tokens": 4000,
            "n_groups": 30,
            "nll": 3.0 - 0.01 * number - 0.02 * step,
            "ppl": 20.0,
        }
        for store, seed in where
        for number, arm in enumerate(ARMS)
        for step in ((0,) if arm == "base" else (0, 5))
    ]
    excess = [
        {
            "arm": arm,
            "against": other,
            "store": store,
            "in_domain": store == stores[0],
            "seed": seed,
            "learning_rate": 1e-4,
            "against_learning_rate": 1e-4,
            "step": 5,
            "tokens_seen": 5000,
            "distinct_tokens": 4500,
            "last": True,
            "n_tokens": 4000,
            "n_groups": 30,
            "nll": 3.0,
            "against_nll": 2.98,
            "excess": 0.0198,
            "lo": -0.01,
            "hi": 0.05,
            "excess_pct": 2.0,
            "lo_pct": -1.0,
            "hi_pct": 5.13,
            "verdict": verdict,
        }
        for store, seed in where
        for arm, other in PAIRS
    ]
    gates = [
        {
            "arm": "gated",
            "seed": seed,
            "learning_rate": 1e-2,
            "chosen": True,
            "phase": 2,
            "step": 5,
            "tokens_seen": 5000,
            "distinct_tokens": 4500,
            "store": store,
            "split": "test",
            "layer": 1,
            "mean_gate": 0.356,
            "share_linear": 0.72,
        }
        for store, seed in where
    ]
    work = [
        {
            "arm": arm,
            "seed": seed,
            "store": store,
            "layers": layers,
            "mean_gate": 0.356,
            "share_linear": share,
            "mlp_flops_saved": 0.8125 * share,
            "flops_saved": 0.25 * share,
        }
        for store, seed in where
        for arm, layers, share in (("control", "", 0.0), ("gated_hard", "0,1", 0.44))
    ]
    tables = {
        "finetune": points,
        "finetune_summary": excess,
        "finetune_gates": gates,
        "finetune_work": work,
        "finetune_timing": times(),
    }
    return {**make_tables(stores, n_layers=2), **tables}


@pytest.mark.parametrize(
    ("others", "arms", "words"),
    [
        ((), (), ""),
        ((3e-5, 3e-4), ("control_matched",), ""),
        (
            (3e-5,),
            ("control_matched",),
            "control_matched was best at the largest learning rate tried (0.0001), and",
        ),
        (
            (3e-4,),
            ("linear", "control_matched"),
            "linear and control_matched were best at the smallest learning rate tried (0.0001), and a",
        ),
    ],
)
def test_a_rate_at_an_end_of_those_tried_is_said(
    others: tuple[float, ...], arms: tuple[str, ...], words: str
) -> None:
    rows = everything()
    for rate in others:
        rows["finetune"] += [
            row | {"learning_rate": rate, "chosen": False, "nll": 5.0}
            for row in rows["finetune"]
            if row["arm"] in arms and row["chosen"] and row["seed"] == 0
        ]
    said = tuning_section.claim(make_results(rows))
    assert ("learning rate" in said) == bool(words)
    assert words in said


def times() -> list[dict[str, Any]]:
    """Seconds of the model and of what stands in."""
    return [
        {
            "name": name,
            "kind": name.partition("@")[0],
            "layers": "" if name == "original" else "0,1",
            "n_layers": 0 if name == "original" else 2,
            "phase": "prefill",
            "sequence_length": 64,
            "device": "cpu",
            "dtype": "float32",
            "threads": 2,
            "batch_size": 1,
            "n_steps": 1,
            "n_runs": 5,
            "share": share,
            "seconds": seconds,
            "seconds_q25": seconds,
            "seconds_q75": seconds,
            "tokens_per_second": 64 / seconds,
            "original_seconds": 0.5,
            "ratio": seconds / 0.5,
            "ratio_q25": seconds / 0.5,
            "ratio_q75": seconds / 0.5,
            "time_saved": 1 - seconds / 0.5,
            "flops_saved": 0.25 * share,
        }
        for name, share, seconds in (("original", 0.0, 0.5), ("gated@input", 0.44, 0.4375))
    ]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_nothing(monkeypatch)


def test_what_is_read_is_what_is_written() -> None:
    for name, columns in TUNING_COLUMNS.items():
        assert set(columns) <= set(FINETUNE_SCHEMAS[name].names)
    rows = everything()
    assert all(set(rows[name][0]) == set(FINETUNE_SCHEMAS[name].names) for name in TUNING_COLUMNS)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("stores", [("only",), STORES])
def test_the_section_claims_what_its_verdicts_allow(stores: tuple[str, ...]) -> None:
    for verdict in ("better", "worse", VERDICT, "too few documents"):
        found = make_results(everything(verdict, stores))
        document = page.render(found)
        Structure(document)
        assert {"tuning", "excess"} <= figures(document)
        claim = tuning_section.claim(found)
        assert re.match(r"After the same 5.000 tokens, linear against control_matched: ", claim)
        assert claim.count(f"({verdict})") == len(stores)
        assert '<a href="#tuning">Training</a>' in document
        shown = plain(document.partition("</style>")[2])
        # A gate, rows below a half, an interval; FLOPs of the hard arm (.8125 · .44, .25 · .44); time.
        for number in ("0.356", "72", "5.1", "35.8", "11.0", "87.5"):
            assert number in shown


def test_tokens_are_exact_only_where_all_seeds_saw_as_many() -> None:
    """Windows are drawn by seed: arms of one seed see the same, other seeds see others."""
    rows = everything(stores=("only",))
    for row in rows["finetune_summary"]:
        row["tokens_seen"] = (999, 578)[row["seed"]]
    assert tuning_section.claim(make_results(rows)).startswith(
        "After the same windows of each seed (788 tokens on average, 578 to 999), linear against "
    )


FALLING = "; the test loss of linear was still falling at its last points"


def test_an_arm_that_was_still_learning_says_so() -> None:
    """Its last point lies below the one before in every seed; a seed that turned up is an end."""
    rows = everything(stores=("only",))
    assert tuning_section.claim(make_results(rows)).endswith(
        f"{FALLING}, so that more tokens may change this"
    )
    ended = [row | {"step": 9, "nll": row["nll"] + 0.001} for row in rows["finetune"]
             if (row["arm"], row["seed"], row["step"]) == ("linear", 1, 5)]  # fmt: skip
    assert FALLING not in tuning_section.claim(make_results(rows | {"finetune": rows["finetune"] + ended}))
    others = [row | {"chosen": False} for row in ended]  # a learning rate that was not chosen says nothing
    assert FALLING in tuning_section.claim(make_results(rows | {"finetune": rows["finetune"] + others}))


def test_the_corpus_on_which_an_arm_was_still_learning_is_named() -> None:
    rows = everything()
    for row in rows["finetune"]:
        if row["store"] == STORES[1] and row["step"] == 5:
            row["nll"] = 3.5
    said = tuning_section.claim(make_results(rows))
    assert f"{FALLING} on docs:python, so that" in said


@pytest.mark.usefixtures("undrawn")
def test_without_a_fine_tuning_nothing_is_said() -> None:
    for rows in (make_tables(STORES, n_layers=2), everything() | {name: [] for name in TUNING_COLUMNS}):
        document = page.render(make_results(rows))
        assert "tuning" not in figures(document)
        assert "Training" not in document


@pytest.mark.usefixtures("undrawn")
def test_values_that_are_not_there_leave_no_trace() -> None:
    rows = everything("too few documents")
    for name in TUNING_COLUMNS:
        reals = [field.name for field in FINETUNE_SCHEMAS[name] if str(field.type) == "double"]
        rows[name] = [row | dict.fromkeys(set(reals) - {"learning_rate"}, float("nan")) for row in rows[name]]
    document = page.render(make_results(rows))
    shown = plain(document.partition("</style>")[2])
    assert not re.search(r"\b(?:nan|NaN|None(?! is accepted)|null|inf)\b", shown)
    Structure(document)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("hostile", HOSTILE)
def test_stored_strings_stay_text(hostile: str) -> None:
    rows = everything()
    for name in TUNING_COLUMNS:
        for row in rows[name]:
            row |= {key: f"{hostile}{row[key]}" for key in {"arm", "against", "verdict"} & row.keys()}
    document = page.render(make_results(rows))
    tags = {tag for tag, _ in Structure(document).tags}
    assert not {"script", "img", "iframe", "link", "form"} & tags
    assert document.count("<style>") == 1
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufffe\uffff]", document)
