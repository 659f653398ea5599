"""Everything that runs a model: anatomy, corpora, harvest. The only place with torch and transformers.

Torch is loaded when a name that needs it is first used: the command line reads settings from here without
it. No module here may bear the name of one of these functions: importing it would hide the function.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .measure_settings import MeasureSettings as MeasureSettings
from .settings import HarvestSettings as HarvestSettings
from .settings import parse as parse_settings
from .tuning_settings import FinetuneSettings as FinetuneSettings

if TYPE_CHECKING:
    from .corpora import Corpus, Document
    from .exporting import export, load_linearised, save_linearised
    from .harvesting import collect, harvest
    from .measure_request import measure_is_current
    from .measuring import measure
    from .outcome import Harvested
    from .peek_result import Peek
    from .peeking import peek
    from .repairing import Repaired, repair
    from .stopping import stop_on_signals
    from .tuning import finetune
    from .tuning_request import finetune_is_current

__all__ = [
    "Corpus",
    "Document",
    "FinetuneSettings",
    "HarvestSettings",
    "Harvested",
    "MeasureSettings",
    "Peek",
    "Repaired",
    "collect",
    "export",
    "finetune",
    "finetune_is_current",
    "harvest",
    "load_linearised",
    "measure",
    "measure_is_current",
    "parse_settings",
    "peek",
    "repair",
    "save_linearised",
    "stop_on_signals",
]

_HOME = {
    "Corpus": ".corpora",
    "Document": ".corpora",
    "Harvested": ".outcome",
    "collect": ".harvesting",
    "export": ".exporting",
    "finetune": ".tuning",
    "finetune_is_current": ".tuning_request",
    "harvest": ".harvesting",
    "load_linearised": ".exporting",
    "save_linearised": ".exporting",
    "measure": ".measuring",
    "measure_is_current": ".measure_request",
    "Peek": ".peek_result",
    "Repaired": ".repairing",
    "peek": ".peeking",
    "repair": ".repairing",
    "stop_on_signals": ".stopping",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)
