"""Query rows of a work tile: their positions, the keys that they see, and what cap and slopes make of their
scores. Legend and ``SPEC``: as in attend.py.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torchpaged.custom_ops.attention.triton.block_sparse import sees_block, shifts_of


class Rows(NamedTuple):
    """Query rows of a work tile, ``[M]`` but for ``context``.

    Attributes:
        valid: the row is one of the request's.
        position: over the keys; under a tree mask over those that the row sees.
        low, end: keys that the row sees; under a tree mask ``low`` bounds positions.
        word, context: as in `branch_sees`.
        shift: as in `sees_block`.
    """

    valid: Any
    position: Any
    low: Any
    end: Any
    word: Any
    context: Any
    shift: Any


@triton.jit
def tanh(x):
    """tanh in float32: a series near 0, where the formula with exp cancels."""
    x2 = x * x
    series = x * (
        1.0 + x2 * (-0.33333333333 + x2 * (0.13333333333 + x2 * (-0.05396825397 + x2 * 0.02186948854)))
    )
    far = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    return tl.where(tl.abs(x) < 0.3, series, far)


@triton.jit
def visible_range(position, seq_len, SPEC: tl.constexpr):
    """The keys ``[low, end)`` between the first and the last that a query at ``position`` sees. Empty below
    position 0."""
    low = tl.zeros_like(position)
    end = tl.zeros_like(position) + seq_len
    if SPEC.causal:
        end = tl.minimum(end, position + 1)
    if SPEC.window_left >= 0:
        low = tl.maximum(low, position - SPEC.window_left)
    if SPEC.window_right >= 0:
        end = tl.minimum(end, position + SPEC.window_right + 1)
    if SPEC.chunk_size > 0:
        chunk = position // SPEC.chunk_size * SPEC.chunk_size
        low = tl.maximum(low, chunk)
        end = tl.minimum(end, chunk + SPEC.chunk_size)
    end = tl.where(position < 0, 0, end)
    return low, tl.maximum(end, low)


@triton.jit
def count_bits(x):
    """Set bits of int64 numbers that are not negative."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    x = x + (x >> 32)
    return (x & 127).to(tl.int32)


@triton.jit
def branch_of(tree_ptr, start, query, context, valid):
    """Of rows ``query [M]`` of a request whose token rows begin at ``start``: what they see of its query
    tokens under a tree mask, a bit each, and their positions, counted over that and the context."""
    own = (tl.zeros_like(query) + 1).to(tl.int64) << tl.minimum(query, 63)
    word = tl.load(tree_ptr + (start + query), mask=valid, other=0) & (own - 1)
    return word | own, context + count_bits(word)


@triton.jit
def query_rows(inputs, start, query, head, query_len, seq_len, valid, SPEC: tl.constexpr):
    """The `Rows` of query tokens ``query [M]``, of heads ``head [M]``, of a request whose token rows begin at
    ``start``."""
    position = seq_len - query_len + query
    low, end = visible_range(position, seq_len, SPEC)
    word = position
    context = seq_len - query_len
    if SPEC.tree:  # low bounds positions, of which a key's is never above its place
        word, position = branch_of(inputs.tree, start, query, context, valid)
        low, _ = visible_range(position, seq_len, SPEC)
    end = tl.where(valid, end, low)
    shift = position
    if SPEC.block_sparse is not None:
        shift = shifts_of(head, SPEC)
    return Rows(valid, position, low, end, word, context, shift)


@triton.jit
def beside(rows, AXES: tl.constexpr):
    """The same `Rows` with their one dimension at the place that ``AXES`` leave free, to meet keys."""
    valid, position = tl.expand_dims(rows.valid, AXES), tl.expand_dims(rows.position, AXES)
    low, end = tl.expand_dims(rows.low, AXES), tl.expand_dims(rows.end, AXES)
    word, shift = tl.expand_dims(rows.word, AXES), tl.expand_dims(rows.shift, AXES)
    return Rows(valid, position, low, end, word, rows.context, shift)


@triton.jit
def branch_position(word, context, key):
    """Where a key counts as being for a row of this word; its own key at the furthest."""
    token = tl.minimum(tl.maximum(key - context, 0), 63)
    before = ((tl.zeros_like(token) + 1).to(tl.int64) << token) - 1
    return tl.where(key < context, key, context + count_bits(word & before))


@triton.jit
def branch_sees(rows, key, LOW: tl.constexpr):
    """Whether rows see a key that is not behind their own. LOW: rows may not see the first
    positions."""
    token = tl.minimum(tl.maximum(key - rows.context, 0), 63)
    seen = (key < rows.context) | (((rows.word >> token) & 1) != 0)
    if LOW:
        seen = seen & (branch_position(rows.word, rows.context, key) >= rows.low)
    return seen


@triton.jit
def seen_by(key, rows, LOW: tl.constexpr, SPEC: tl.constexpr, tile=None):
    """Whether rows, which lie `beside` the keys, see them. LOW: as in `branch_sees`; ``tile``: where all keys
    are of one block of a mask that hides blocks, one of them: asked once a row, not once a key."""
    seen = key < rows.end
    if LOW:
        seen = seen & (key >= rows.low)
    if SPEC.tree:
        seen = seen & branch_sees(rows, key, LOW)
    if SPEC.block_sparse is not None:
        if tile is None:
            seen = seen & sees_block(rows, key, SPEC)
        else:
            seen = seen & sees_block(rows, tile, SPEC)
    return seen


@triton.jit
def capped(s, soft_cap, SPEC: tl.constexpr):
    """Scores behind the soft cap."""
    if SPEC.soft_cap:
        s = soft_cap * tanh(s / soft_cap)
    return s


@triton.jit
def sloped(s, key, slope, rows, TREE: tl.constexpr, SPEC: tl.constexpr):
    """Scores of keys behind ALiBi; tensors as in `seen_by`. TREE: positions are a branch's."""
    if SPEC.alibi:
        if TREE:
            key = branch_position(rows.word, rows.context, key)
        s += slope * (key - rows.position).to(tl.float32)
    return s
