"""Everything offline: moments, surrogates, needs, intervals; from sealed stores to a study. Never torch."""

from .fit import fit as fit
from .fit import fit_is_current as fit_is_current
from .settings import FitSettings as FitSettings
from .settings import parse as parse
