"""The config of a model without its weights: a name in, the config as plain values out. Cost: one small file,
fetched where the model is on the Hub and not here yet.
"""

from typing import Any

from .pretrained import read_config, shared_options
from .sources import find


def config_dict(model: str, revision: str | None, trust_remote_code: bool) -> dict[str, Any]:
    """What config.json says, with the defaults of its family."""
    source = find(model)
    return read_config(source, shared_options(source, revision, trust_remote_code)).to_dict()
