"""The MLP's input taken apart: blocks of stored rows in, x = β + t + p + k in float32 out.

t, p and k are γ ⊙ centre(·) · s of the token embedding, the position embedding (of models with absolute
positions) and the residual less the stored embedding, which is what attention and earlier MLPs wrote; s is
the row's own factor of normalisation (layernorm 1/√(var + ε), rmsnorm 1/√(mean square + ε), of the residual),
γ and β the norm's affine, and centre the identity where the norm does not subtract the mean. Exact up to
rounding, since all but s is linear. Cost: two reads a block, and six arrays of its size.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float32, Int

from ..store import Reader, UsageError
from .layers import layer_source
from .norms import TILE_VALUES, Norm, apply_norm, squared_norms

Rows = Float32[np.ndarray, "token feature"]


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Rows of one layer and what each is the sum of."""

    residual: Rows
    x: Rows  # norm(residual): what the MLP receives
    embedding: Rows  # of the token alone: the stored one less that of the position
    t: Rows
    p: Rows | None  # None: the model has no table of positions, or adds none to the embedding
    k: Rows
    beta: Float32[np.ndarray, "feature"]
    norm: Norm

    @property
    def token(self) -> Rows:
        """norm(token embedding), computed when asked for: it shares no scale with the context, as t does."""
        return apply_norm(self.embedding, self.norm)

    def rows(self, start: int, stop: int) -> "Parts":
        """Some of the rows, as views."""
        chosen = slice(start, stop)
        return replace(
            self,
            residual=self.residual[chosen],
            x=self.x[chosen],
            embedding=self.embedding[chosen],
            t=self.t[chosen],
            p=None if self.p is None else self.p[chosen],
            k=self.k[chosen],
        )

    def deviation(self) -> Float32[np.ndarray, "token"]:
        """Of each row, the largest |x − (β + t + p + k)| over features, in units of ‖x‖/√d."""
        n, d = self.x.shape
        found, tile = np.empty(n, np.float32), _tile_rows(d)
        for start in range(0, n, tile):
            part = slice(start, start + tile)
            rest = self.x[part] - self.beta
            for one in (self.t, self.p, self.k):
                if one is not None:
                    rest -= one[part]
            scale = np.sqrt(squared_norms(self.x[part]) / np.float32(d))
            largest = np.abs(rest).max(axis=1)
            # A row that is nothing but zeros has no unit; it deviates by what is left.
            found[part] = np.divide(largest, scale, out=largest.copy(), where=scale > 0)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class PartsSource:
    """Where the parts of a layer's rows come from; opens again in another process."""

    reader: Reader
    layer: int
    norm: Norm
    positions: Float32[np.ndarray, "position feature"] | None

    def block(self, block: int, rows: Int[np.ndarray, "row"] | None = None) -> Parts:
        """Parts of every row of a block, or of the `rows` named by their numbers within it."""
        residual = self.reader.rows("residual", self.layer, block, block + 1)
        embedding = self.reader.rows("embedding", None, block, block + 1)
        position = None if self.positions is None else self.reader.column_block("position", block)
        if rows is not None:
            residual, embedding = residual[rows], embedding[rows]
            position = None if position is None else position[rows]
        return self._take_apart(residual, embedding, position)

    def embedding(self, block: int, rows: Int[np.ndarray, "row"] | None = None) -> Rows:
        """The token embedding alone, as in `block`."""
        embedding = self.reader.rows("embedding", None, block, block + 1)
        if self.positions is not None:
            embedding -= self.positions[self.reader.column_block("position", block)]
        return embedding if rows is None else embedding[rows]

    def _take_apart(self, residual: Rows, embedding: Rows, position: np.ndarray | None) -> Parts:
        """`embedding` becomes that of the token alone, in place."""
        scale = row_scale(residual, self.norm)
        k = residual - embedding
        p = None
        if self.positions is not None and position is not None:
            p = self.positions[position]
            embedding -= p
            _project(p, scale, self.norm, out=p)
        _project(k, scale, self.norm, out=k)
        t = np.empty_like(embedding)
        _project(embedding, scale, self.norm, out=t)
        bias = self.norm.bias
        beta = np.zeros(residual.shape[1], np.float32) if bias is None else bias
        return Parts(residual, apply_norm(residual, self.norm), embedding, t, p, k, beta, self.norm)


def parts_source(reader: Reader, layer: int) -> PartsSource:
    """The source of one stored layer; UsageError where the store cannot be taken apart."""
    if "embedding" not in reader.sites:
        raise UsageError(
            f"{reader.path}: the store has no `embedding`, without which token and context cannot be told "
            f"apart: harvest it again with sites={','.join(('embedding', *reader.sites))}"
        )
    positions = reader.position_embedding
    if positions is not None and (last := int(reader.column("position").max(initial=-1))) >= len(positions):
        raise UsageError(
            f"{reader.path}: position {last} lies beyond the {len(positions)} rows of `position_embedding`: "
            "harvest it again with a shorter sequence_length"
        )
    return PartsSource(reader, layer, layer_source(reader, layer).norm, positions)


def row_scale(residual: Rows, norm: Norm) -> Float32[np.ndarray, "token"]:
    """s of each row: the factor that the norm multiplies it by."""
    n, d = residual.shape
    scale = np.ones(n, np.float32)
    if norm.kind == "none":
        return scale
    tile = _tile_rows(d)
    for start in range(0, n, tile):
        rows = residual[start : start + tile]
        if norm.kind == "layernorm":
            rows = rows - rows.mean(axis=1, keepdims=True)
        mean_square = squared_norms(rows) / np.float32(d)
        scale[start : start + tile] = 1.0 / np.sqrt(mean_square + np.float32(norm.epsilon))
    return scale


def _project(rows: Rows, scale: np.ndarray, norm: Norm, out: Rows) -> None:
    """γ ⊙ centre(rows) · s; `out` may be `rows` itself."""
    tile = _tile_rows(rows.shape[1])
    for start in range(0, rows.shape[0], tile):
        part, kept = rows[start : start + tile], out[start : start + tile]
        if norm.kind == "layernorm":
            part = np.subtract(part, part.mean(axis=1, keepdims=True), out=kept)
        np.multiply(part, scale[start : start + tile, None], out=kept)
        if norm.weight is not None:
            kept *= norm.weight


def _tile_rows(n_features: int) -> int:
    return max(1, TILE_VALUES // max(1, n_features))
