"""The settings file with every field explained, made from the settings classes: `template.toml`.

In: the classes. Out: TOML text in which every field stands with its sentence and its default, commented out;
with everything uncommented it means the same. A test compares it with the file beside this module, which
`python -m nearline.workflows.template` prints. Cost: none.
"""

import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, Final

import pydantic

from ..analyze.compute_settings import IN_TABLE, MACHINE_FIELDS, ComputeSettings
from ..store.toml import toml_bytes
from .flags import own_first
from .study_tables import COMPUTED, NOT_HERE, STEP_SETTINGS, UNSET, CorpusTable, ModelTable, StudyFile

WIDTH: Final = 100
_HEAD: Final = f"""\
A study of several models on several corpora, for `nearline run`: every setting, explained.

Lines that begin with # and a letter are settings at their defaults: take the # away and change them.
Relative paths are counted from this file. A narrower table wins: [collect], then `collect` of a model, then
`collect` of a corpus. The value "{UNSET}" takes a setting back to its default. What is current is not
done again.
"""
_TABLES: Final = {
    "collect": "Harvests: one store for each model and corpus.",
    "fit": "Surrogates, one study for each model, over the stores of all corpora.",
    "analyze": "What predicts the need for the nonlinearity.",
    "measure": "What replacing MLPs costs the live model.",
    "finetune": "Fine-tuning beside controls. It runs where this table is there.",
    "report": "One page for each model. It has no settings.",
    "compute": "Where and with how much fits and analyses compute; results are the same.",
}
_NAMED: Final = ("fit_on", "stores", "train_on")
_EXAMPLE: Final = {"layers": 6, "d_model": 192, "d_ff": 768, "vocabulary": 4096}


def template() -> str:
    """The text of template.toml."""
    lines = [*_prose(_HEAD), "", *_field("out", StudyFile.model_fields["out"])]
    for step, kind in STEP_SETTINGS.items():
        header = f"[{step}]"
        lines += ["", *_prose(_TABLES[step]), f"#{header}" if step == "finetune" else header]
        for name, field in own_first(kind).items():
            if name not in {*NOT_HERE.get(step, ()), *(MACHINE_FIELDS if step in COMPUTED else ())}:
                lines += _field(name, field)
    lines += ["", *_prose(_TABLES["compute"]), "[compute]"]
    for name, called in IN_TABLE.items():
        lines += _field(name, ComputeSettings.model_fields[called])
    lines += ["", *_prose("The models."), "[[models]]", 'model = "tiny-gpt2"', *_of_entry(ModelTable)]
    for corpus in ("docs:stdlib", "docs:python"):
        lines += ["", "[[corpora]]", f'corpus = "{corpus}"']
        lines += [] if corpus != "docs:stdlib" else _of_entry(CorpusTable)
    return "\n".join(lines) + "\n"


def _of_entry(kind: type[pydantic.BaseModel]) -> Iterator[str]:
    for name, field in kind.model_fields.items():
        match name:
            case "model" | "corpus":
                continue
            case "name":
                yield from _prose(field.description or "")
                yield f'#name = "{"tiny-gpt2" if kind is ModelTable else "stdlib"}"'
            case "shape":
                yield from _prose(field.description or "")
                yield f"#shape = {{ {', '.join(f'{size} = {value}' for size, value in _EXAMPLE.items())} }}"
            case _:
                yield from _prose(f"{name}: {field.description}")
                yield f"#{name} = {{}}"


def _field(name: str, field: Any) -> Iterator[str]:
    """A sentence and a default; a field that is not set has the word for that."""
    said = f"{field.description} Corpora by their names." if name in _NAMED else field.description
    yield from _prose(said)
    value = UNSET if field.default is None else field.default
    yield f"#{toml_bytes({name: list(value) if isinstance(value, tuple) else value}).decode().strip()}"


def _prose(text: str) -> Iterable[str]:
    for paragraph in text.strip().split("\n\n"):
        words = " ".join(paragraph.split())
        yield from textwrap.wrap(words, WIDTH, initial_indent="# ", subsequent_indent="# ")


if __name__ == "__main__":
    sys.stdout.write(template())
