"""nearline: harvest a language model's MLP inputs and outputs once; measure offline which MLPs are nearly
linear.

`nearline.collect` runs the model (torch); `nearline.store`, `nearline.analyze` and `nearline.reports` work
from the store and never load torch. Importing this package loads nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .collect.peeking import peek as peek

__version__ = "0.1.0"
__all__ = ["peek"]


def __getattr__(name: str) -> Any:
    if name != "peek":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(".collect.peeking", __name__).peek
