"""The application object that commands register with, and the flags that several of them share.

In: nothing. Out: `app`, `Json`, `Config`, and the flag classes made from the settings. Cost: the import of
the command line library.
"""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from .. import __version__
from ..analyze.analyze_settings import AnalyzeSettings
from ..analyze.settings import FitSettings
from ..collect.measure_settings import MeasureSettings
from ..collect.settings import HarvestSettings
from ..collect.tuning_settings import FinetuneSettings
from .flags import flags_of

CollectFlags = flags_of(HarvestSettings, leave_out=("model", "corpus"))
FitFlags = flags_of(FitSettings)
AnalyzeFlags = flags_of(AnalyzeSettings)
MeasureFlags = flags_of(MeasureSettings)
FinetuneFlags = flags_of(FinetuneSettings)

Json = Annotated[bool, Parameter(name="--json", help="Print the facts as JSON.", negative="")]
Config = Annotated[Path | None, Parameter(help="TOML file with the same names as the flags; flags win.")]

app = App(
    name="nearline",
    help="Harvest a language model's MLP inputs and outputs once; then measure which are nearly linear.",
    version=__version__,
    help_format="plaintext",
    suppress_keyboard_interrupt=False,
)
