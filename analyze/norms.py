"""Norms as analyses use them. They stand in `store.norms`: which norm a layer has is part of the format."""

from ..store.norms import TILE_VALUES as TILE_VALUES
from ..store.norms import Contribution as Contribution
from ..store.norms import Norm as Norm
from ..store.norms import NormKind as NormKind
from ..store.norms import apply_norm as apply_norm
from ..store.norms import parse_kind as parse_kind
from ..store.norms import squared_norms as squared_norms
