"""A gate of a study on live rows: what flows into an MLP in, p(linear) of each row out, in float32.

p = 1/(1 + exp(-(weight · f + bias))), f the features of analyze/gate_features.py made of what is at hand when
the MLP is called: its input x, the residual before the norm, the stream that entered block 0, the token, the
position. Every piece is linear in one of these but for the row's own factor of normalisation, so that a piece
is a vector here, also where its features are a d × d map of the token embedding. A gate that was trained with
a model may have a layer of hidden units on x besides. Cost: d multiplications a row and piece; a float32 copy
of x, and for pieces other than x, of residual and stream.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from ..analyze.context_map import ContextMap
from ..analyze.gate_features import TypeMeans
from .hidden_units import HiddenUnits
from .norm_parameters import NO_NORM, NormParameters

OF_X = ("x", "norm")
OF_TOKEN = ("token", "t", "p", "token_full")
OF_STREAM = ("k", "context_only")
NARROW = ("norm", "position", "token_type")


@dataclass(frozen=True, slots=True, eq=False)
class LiveRows:
    """What is at hand of some rows when their MLP is called; flat, float32, on the model's device."""

    x: Float32[Tensor, "row feature"]
    residual: Float32[Tensor, "row feature"] | None
    stream: Float32[Tensor, "row feature"] | None  # what entered block 0
    token_id: Int[Tensor, "row"]
    position: Int[Tensor, "row"]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What one piece adds to the logit: `own` is on what the norm scales, `token` on the token embedding."""

    name: str
    own: Float32[Tensor, "feature"] | None = None
    token: Float32[Tensor, "feature"] | None = None
    weight: float = 0.0  # of a piece that is one number


@dataclass(frozen=True, slots=True, eq=False)
class GateRouter:
    """A gate, ready to be asked. `threshold`: linear goes what has a larger p."""

    pieces: tuple[Piece, ...]
    bias: float  # NaN: the gate's label had one class only, and nothing goes linear
    threshold: float
    centred: bool  # whether the norm in front of the MLP subtracts the mean
    eps: float | None  # None: there is no norm, and no factor
    positions: Float32[Tensor, "position feature"] | None
    types: Int[Tensor, "type"]
    type_means: Float32[Tensor, "type"]
    grand_mean: float
    hidden: HiddenUnits | None = None

    @property
    def wants_parts(self) -> bool:
        """Whether it looks at the residual and the stream too, and not at x, token and position alone."""
        return any(piece.name in (*OF_TOKEN, *OF_STREAM) for piece in self.pieces)

    def on(self, device: torch.device) -> "GateRouter":
        """The same gate with its vectors on another device."""
        if self.types.device == device:
            return self
        pieces = tuple(
            replace(
                piece,
                own=None if piece.own is None else piece.own.to(device),
                token=None if piece.token is None else piece.token.to(device),
            )
            for piece in self.pieces
        )
        return replace(
            self,
            pieces=pieces,
            positions=None if self.positions is None else self.positions.to(device),
            types=self.types.to(device),
            type_means=self.type_means.to(device),
            hidden=None if self.hidden is None else self.hidden.on(device),
        )

    def probability(self, rows: LiveRows) -> Float32[Tensor, "row"]:
        """p(linear) of each row."""
        known = _Known(self, rows)
        with torch.autocast(rows.x.device.type, enabled=False):
            logit = torch.full_like(rows.x[:, 0], self.bias)
            for piece in self.pieces:
                logit = logit + known.part(piece)
            if self.hidden is not None:
                logit = logit + self.hidden(rows.x)
            return torch.sigmoid(logit)


class _Known:
    """What several pieces share, made when it is first asked for."""

    def __init__(self, gate: GateRouter, rows: LiveRows) -> None:
        self._gate, self._rows = gate, rows
        self._scale: Tensor | None = None
        self._token: Tensor | None = None

    def part(self, piece: Piece) -> Float32[Tensor, "row"]:
        rows, gate = self._rows, self._gate
        match piece.name:
            case "x":
                assert piece.own is not None
                return rows.x @ piece.own
            case "norm":
                return piece.weight * torch.linalg.vector_norm(rows.x, dim=1)
            case "position":
                return piece.weight * torch.log1p(rows.position.float())
            case "token_type":
                return piece.weight * self._type_mean()
            case "token":
                return self._projected(self.token, piece) * _factor(self.token, gate)
            case "t" | "token_full":
                own = self._projected(self.token, piece) * self.scale
                return own if piece.token is None else own + self.token @ piece.token
            case "k" | "context_only":
                assert rows.residual is not None
                assert rows.stream is not None
                own = self._projected(rows.residual - rows.stream, piece) * self.scale
                return own if piece.token is None else own - self.token @ piece.token
            case "p":
                return self._projected(self._position_rows(), piece) * self.scale
            case name:
                raise ValueError(f"piece {name!r} is not known before the MLP has run")

    @property
    def scale(self) -> Float32[Tensor, "row"]:
        """s of each row: what the norm multiplies the residual by."""
        assert self._rows.residual is not None
        if self._scale is None:
            self._scale = _factor(self._rows.residual, self._gate)
        return self._scale

    @property
    def token(self) -> Float32[Tensor, "row feature"]:
        """The token embedding alone."""
        assert self._rows.stream is not None
        if self._token is None:
            positions = self._gate.positions
            self._token = (
                self._rows.stream if positions is None else self._rows.stream - self._position_rows()
            )
        return self._token

    def _position_rows(self) -> Float32[Tensor, "row feature"]:
        assert self._gate.positions is not None
        return self._gate.positions[self._rows.position]

    def _projected(self, values: Tensor, piece: Piece) -> Float32[Tensor, "row"]:
        assert piece.own is not None
        if self._gate.centred:
            values = values - values.mean(dim=1, keepdim=True)
        return values @ piece.own

    def _type_mean(self) -> Float32[Tensor, "row"]:
        gate, ids = self._gate, self._rows.token_id
        if not gate.types.numel():
            return torch.full_like(self._rows.x[:, 0], gate.grand_mean)
        at = torch.searchsorted(gate.types, ids).clamp_max(gate.types.numel() - 1)
        return torch.where(gate.types[at] == ids, gate.type_means[at], gate.grand_mean)


def _factor(values: Float32[Tensor, "row feature"], gate: GateRouter) -> Float32[Tensor, "row"]:
    """1/√(mean square + ε), about the mean where the norm centres."""
    if gate.eps is None:
        return torch.ones_like(values[:, 0])
    if gate.centred:
        values = values - values.mean(dim=1, keepdim=True)
    return torch.rsqrt(values.square().mean(dim=1) + gate.eps)


def gate_router(
    weight: Float[np.ndarray, "feature"],
    bias: float,
    threshold: float,
    pieces: Mapping[str, int],
    types: TypeMeans,
    *,
    norm: NormParameters = NO_NORM,
    positions: Float32[Tensor, "position feature"] | None = None,
    context: ContextMap | None = None,
) -> GateRouter:
    """A gate with `weight` on its raw features, which are those of `pieces` (name: how many), in order.

    `norm` and `positions` are those of the layer and model, and `context` the k̂ of the layer: needed by the
    pieces made of them, and folded into the vectors here, in float64.
    """
    made: list[Piece] = []
    at, constant = 0, float(bias)
    for name, width in pieces.items():
        part = weight[at : at + width].astype(np.float64)
        at += width
        if name in NARROW:
            made.append(Piece(name, weight=float(part[0])))
            continue
        piece, added = _wide(name, part, norm, context)
        made.append(piece)
        constant += added
    return GateRouter(
        pieces=tuple(made),
        bias=constant,
        threshold=threshold,
        centred=norm.kind == "layernorm",
        eps=None if norm.kind == "none" else norm.eps,
        positions=None if positions is None else positions.float(),
        types=torch.from_numpy(types.types.astype(np.int64)),
        type_means=torch.from_numpy(types.mean.astype(np.float32)),
        grand_mean=float(types.grand),
    )


def _wide(
    name: str, part: Float[np.ndarray, "feature"], norm: NormParameters, context: ContextMap | None
) -> tuple[Piece, float]:
    """One wide piece as vectors, and what it adds to the bias."""
    if name == "x":
        return Piece(name, own=_vector(part)), 0.0
    own = part if norm.weight is None else part * norm.weight
    if name == "token":
        return Piece(name, own=_vector(own)), 0.0 if norm.bias is None else float(part @ norm.bias)
    if name not in ("token_full", "context_only"):
        return Piece(name, own=_vector(own)), 0.0
    if context is None:
        raise ValueError(f"piece {name!r} needs the context map of its layer")
    foretold = float(part @ context.bias)
    return (
        Piece(name, own=_vector(own), token=_vector(context.weight.astype(np.float64).T @ part)),
        foretold if name == "token_full" else -foretold,
    )


def _vector(values: np.ndarray) -> Float32[Tensor, "feature"]:
    return torch.from_numpy(values.astype(np.float32))
