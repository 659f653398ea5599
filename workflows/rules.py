"""What each rule of the Snakefile asks for: marks, settings that a job depends on, cores, memory, disk, GPUs.

In: a settings file and an output folder. Out: a frozen `Rules` whose methods take the wildcards of a job. A
job's mark is an empty file in `OUT/steps`, written when the step is done; the digest of its settings is a
parameter, so that a changed setting runs the step again and nothing before it. Cost: none; no torch is
loaded.
"""

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from ..collect.block_rows import DEFAULT_MEMORY_LIMIT_BYTES
from ..store.settings import parse_bytes
from .shapes import shape_of
from .study_checks import checked_study
from .study_plan import plan_store
from .study_settings import ModelStudy, StoreJob, Whole
from .study_steps import loss_settings, needs_losses

ON_DEVICE: Final = ("collect", "losses", "measure", "finetune")
CORES: Final = 4  # of a job where the settings name no threads or workers
PROGRAM_BYTES: Final = 2 * 2**30  # torch, texts and tables
UNKNOWN_MODEL_BYTES: Final = 12 * 2**30  # of weights, where no shape is written and the model is not here
FINETUNE_COPIES: Final = 5  # of float32 weights: two models, gradients, two moments of the optimiser
MB: Final = 10**6


@dataclass(frozen=True, slots=True)
class Rules:
    """A study, as rules with wildcards `model` and `corpus`."""

    whole: Whole

    @classmethod
    def read(cls, settings: str, out: str | None = None) -> "Rules":
        """The rules of a settings file; what is wrong with it is refused before any job."""
        return cls(checked_study(Path(settings), None if out is None else Path(out).resolve()))

    @property
    def models(self) -> list[str]:
        return [model.name for model in self.whole.models]

    @property
    def corpora(self) -> list[str]:
        return list(self.whole.corpora)

    @property
    def command(self) -> str:
        """What every job calls, with --only and --model behind it."""
        words = (sys.executable, "-m", "nearline", "run", str(self.whole.path.resolve()), str(self.whole.out))
        return " ".join(map(shlex.quote, words))

    def mark(self, kind: str, corpus: str = "") -> str:
        """The file that says a step is done, with its wildcards."""
        return f"{self.whole.out}/steps/{{model}}/{kind}{'-' * bool(corpus)}{corpus}"

    def reports(self) -> list[str]:
        return [self.mark("report").format(model=name) for name in self.models]

    def before(self, kind: str, model: str) -> list[str]:
        """The marks that a step waits for."""
        found = self._model(model)
        if kind == "fit":
            return [self.mark("collect", store.corpus).format(model=model) for store in found.stores]
        order = ["fit", *(["losses"] if needs_losses(found) else []), "analyze", "measure"]
        order += [*(["finetune"] if found.finetune is not None else []), "report"]
        return [self.mark(order[order.index(kind) - 1]).format(model=model)]

    def made_of(self, kind: str, model: str, corpus: str = "") -> str:
        """A digest of the settings of a step."""
        if kind == "collect":
            settings: Any = self._store(model, corpus).settings
        elif kind == "losses":
            settings = loss_settings(self._model(model))
        elif kind == "report":
            return kind
        else:
            settings = getattr(self._model(model), kind)
        text = json.dumps(settings.model_dump(mode="json"), sort_keys=True)
        return blake3(text.encode()).hexdigest()[:16]

    def cores(self, kind: str, model: str, corpus: str = "") -> int:
        """Cores of a job: those that its settings name."""
        if kind == "collect":
            return self._store(model, corpus).settings.threads or CORES
        found = self._model(model)
        own: Mapping[str, int | None] = {
            "fit": found.fit.workers,
            "analyze": found.analyze.workers,
            "losses": found.measure.threads,
            "measure": found.measure.threads,
            "finetune": None if found.finetune is None else found.finetune.threads,
        }
        # A visit of the model takes the threads of its harvest where nothing else is said.
        harvest = found.stores[0].settings.threads if kind in ON_DEVICE else None
        return own[kind] or harvest or CORES

    def gpus(self, kind: str, model: str) -> int:
        """One where a step runs the model and its settings do not keep it on the CPU."""
        found = self._model(model)
        if kind == "collect":
            return int(any(store.settings.device != "cpu" for store in found.stores))
        settings = found.finetune if kind == "finetune" else found.measure
        return int(settings is not None and settings.device != "cpu")

    def memory_mb(self, kind: str, model: str) -> int:
        """Main memory: the weights once (fine-tuning: several times), what a step holds beside them."""
        found = self._model(model)
        match kind:
            case "fit":
                return _mb(parse_bytes(found.fit.memory_limit) + PROGRAM_BYTES)
            case "analyze":
                return _mb(parse_bytes(found.analyze.memory_limit) + PROGRAM_BYTES)
            case "collect":
                limits = [
                    one.settings.memory_limit_bytes or DEFAULT_MEMORY_LIMIT_BYTES for one in found.stores
                ]
                return _mb(max(limits) + _weights(found) + PROGRAM_BYTES)
            case "finetune":
                return _mb(FINETUNE_COPIES * _weights(found) + PROGRAM_BYTES)
            case _:
                return _mb(parse_bytes(found.measure.memory_limit) + _weights(found) + PROGRAM_BYTES)

    def disk_mb(self, model: str, corpus: str) -> int:
        """What a harvest writes; 0 where nothing says how large the model is."""
        return _mb(plan_store(self._model(model), self._store(model, corpus)).bytes or 0)

    def _model(self, name: str) -> ModelStudy:
        return next(model for model in self.whole.models if model.name == name)

    def _store(self, model: str, corpus: str) -> StoreJob:
        return next(store for store in self._model(model).stores if store.corpus == corpus)


def _weights(model: ModelStudy) -> int:
    """Bytes of the weights in float32: four projections and two matrices a layer, two embeddings."""
    shape = shape_of(model)
    if shape is None:
        return UNKNOWN_MODEL_BYTES
    layer = 4 * shape.d_model**2 + 2 * shape.d_model * shape.d_ff
    return 4 * (shape.layers * layer + 2 * shape.d_model * shape.vocabulary)


def _mb(n_bytes: int) -> int:
    return -(-n_bytes // MB)
