"""nearline: harvest a language model's MLP inputs and outputs once; measure offline which MLPs are nearly
linear.

`nearline.collect` runs the model (torch); `nearline.store`, `nearline.analyze` and `nearline.reports` work
from the store and never load torch. Importing this package loads nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .collect.peeking import peek as peek
    from .workflows.opening import open as open

__version__ = "0.1.0"
__all__ = ["peek"]  # without `open`, which `from nearline import *` would put in place of Python's own
_HOMES = {"open": ".workflows.opening", "peek": ".collect.peeking"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
