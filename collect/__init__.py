"""Everything that runs a model: anatomy, corpora, harvest. The only place with torch and transformers.

Torch is loaded when a name that needs it is first used: the command line reads settings from here without
it. No module here may bear the name of one of these functions: importing it would hide the function.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .settings import HarvestSettings as HarvestSettings
from .settings import parse as parse_settings

if TYPE_CHECKING:
    from .corpora import Corpus, Document
    from .harvesting import collect, harvest
    from .outcome import Harvested
    from .peek_result import Peek
    from .peeking import peek
    from .repairing import Repaired, repair
    from .stopping import stop_on_signals

__all__ = [
    "Corpus",
    "Document",
    "HarvestSettings",
    "Harvested",
    "Peek",
    "Repaired",
    "collect",
    "harvest",
    "parse_settings",
    "peek",
    "repair",
    "stop_on_signals",
]

_HOME = {
    "Corpus": ".corpora",
    "Document": ".corpora",
    "Harvested": ".outcome",
    "collect": ".harvesting",
    "harvest": ".harvesting",
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
