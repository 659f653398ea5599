"""What a study or a store lacks for a measurement: settings in, one sentence out; no model is looked at.

Cost: names of columns, and the lengths of windows.
"""

from collections.abc import Sequence
from typing import Final

from ..analyze.evidence import BROUGHT_BY, Evidence, missing_need
from ..analyze.needs import LOSS_ESTIMATE, NEEDS
from ..analyze.stores import spell_layers
from ..store import UsageError
from .interventions import Intervention
from .measure_settings import MeasureSettings, layers_of_set
from .measured_windows import check_length

GRADIENT: Final = "mlp_output_grad"
# Needs that a measurement brings: it cannot route by them.
_OWN: Final = ("loss", "kl", "loss_single")


def check_need(evidence: Evidence, one: Intervention, settings: MeasureSettings) -> None:
    """The need that an oracle knows is there, and is none that this measurement brings."""
    if one.kind != "oracle":
        return
    need = one.need or settings.need
    if need in _OWN:
        raise UsageError(
            f"{one.name}: {need} is what is measured here, and cannot route; name one of "
            f"{', '.join((*NEEDS, LOSS_ESTIMATE))}"
        )
    for store in evidence.stores:
        for layer in evidence.layers:
            names = [name for columns in evidence.need_files(layer, store).values() for name in columns]
            if need not in names or need not in (*NEEDS, *BROUGHT_BY):
                raise missing_need(need, names, store)


def check_sets(evidence: Evidence, settings: MeasureSettings) -> None:
    for one in settings.compound:
        if missing := sorted(set(layers_of_set(one) or ()) - set(evidence.layers)):
            raise UsageError(
                f"compound={one}: layer {missing[0]} is not among those that are measured "
                f"({spell_layers(evidence.layers)})"
            )


def check_lengths(evidence: Evidence, stores: Sequence[str], settings: MeasureSettings) -> None:
    for name in stores:
        for length in settings.sequence_length:
            check_length(evidence.stores[name].reader, name, length)


def check_gradient(evidence: Evidence, stores: Sequence[str]) -> None:
    for name in stores:
        if GRADIENT not in evidence.stores[name].reader.sites:
            raise UsageError(
                f"validate_estimate: store {name} has no site {GRADIENT}, of which loss_estimate is made; "
                f"harvest it with `--sites +{GRADIENT}`, or leave validate_estimate out"
            )
