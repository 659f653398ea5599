"""Everything offline: moments, surrogates, needs, intervals, analyses; from sealed stores to a study. Never
torch.
"""

from .analyze import analyses_are_current as analyses_are_current
from .analyze import analyze as analyze
from .analyze_settings import AnalyzeSettings as AnalyzeSettings
from .fit import fit as fit
from .fit import fit_is_current as fit_is_current
from .settings import FitSettings as FitSettings
from .settings import parse as parse
