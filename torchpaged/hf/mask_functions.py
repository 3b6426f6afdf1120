"""What transformers' mask functions say: causality, a window, chunks, and spans of tokens that see each other
in both directions inside a causal prompt (pictures, a prefix).

A mask function, ``(row, head, query, key) -> bool`` over positions that count padding, is opaque. It is asked
at positions, and has to agree there with a mask that attention can apply by itself: on a grid, or everywhere
where spans are, or may be.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.mask_kinds import MaskKind, Prompt, Rows, Size, Spans

_GRID = 96  # query and key positions of a grid, at most, on each axis
_QUERIES = 64  # positions at which a mask without a cache is asked for all of its keys, at most
_AT_ONCE = 512  # queries whose keys are compared at a time, everywhere

MaskFunction = Callable[..., Any]


class _Block(NamedTuple):
    """Queries and keys at which a mask function is compared with candidates: tensors that broadcast.

    Attributes:
        row, query, key: where it is asked.
        start: the first position of the row that is a token.
        ends: of the keys that each query sees; None: a causal one sees those up to itself.
        inside: whether each query is in a span.
    """

    row: Tensor
    query: Tensor
    key: Tensor
    start: int = 0
    ends: Tensor | None = None
    inside: Tensor | None = None

    def want(self, kind: MaskKind, spans: Spans) -> Tensor:
        """What the mask would say."""
        seen = kind.near(self.query - self.start, self.key - self.start)
        if self.inside is not None and not spans.windowed:
            seen = seen | self.inside
        ends = self.query + 1 if self.ends is None else self.ends
        return seen & (self.key < ends) if kind.causal else seen


def is_causal(mask_function: Any) -> bool:
    """Whether transformers' mask function is one of its causal ones; by identity, as compiled code can
    tell it."""
    return mask_function is not bidirectional_mask_function


def _ask(mask_function: MaskFunction, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """``mask_function`` at places that broadcast, bool of the shape that they broadcast to."""
    shape = torch.broadcast_shapes(row.shape, query.shape, key.shape)
    places = row, torch.zeros((), dtype=torch.int64, device=key.device), query, key
    try:
        return torch.as_tensor(mask_function(*places), device=key.device).expand(shape).bool()
    except Exception:
        if torch.compiler.is_compiling():
            raise
    # A function of single positions, as transformers' own vmap would call it.
    single = torch.vmap(lambda *place: torch.as_tensor(mask_function(*place), device=key.device).bool())
    return single(*(place.expand(shape).reshape(-1) for place in places)).view(shape)


def sees_next(
    mask_function: MaskFunction, rows: int, first: Any, count: int, device: Any, back: bool = False
) -> Tensor:
    """Whether the query at each position from ``first`` on sees the key behind it, ``[rows, count]`` bool;
    ``back``: whether the query behind it sees the key there."""
    place = first + torch.arange(count, device=device)[None]
    query, key = (place + 1, place) if back else (place, place + 1)
    return _ask(mask_function, torch.arange(rows, device=device)[:, None], query, key)


def _agreeing(
    mask_function: MaskFunction, blocks: Iterable[_Block], candidates: Sequence[tuple[MaskKind, Spans]]
) -> list[tuple[MaskKind, Spans]]:
    """The candidates that say what ``mask_function`` says in all blocks; reads the device once."""
    good: Tensor | None = None
    for block in blocks:
        got = _ask(mask_function, block.row, block.query, block.key)
        agree = torch.stack([(got == block.want(*each)).all() for each in candidates])
        good = agree if good is None else good & agree
    agreed = [True] * len(candidates) if good is None else good.tolist()
    return [each for each, is_good in zip(candidates, agreed, strict=True) if is_good]


def kind_without_cache(
    mask_function: Any, local_size: int | None, batch: int, query_len: int, kv_len: int
) -> MaskKind | None:
    """The mask that ``mask_function`` makes over keys that no cache holds; None for one that is neither
    causal nor bidirectional within a window."""
    if mask_function is bidirectional_mask_function:
        return MaskKind(False)
    if mask_function is causal_mask_function:
        return MaskKind() if query_len == kv_len else None
    # Other functions are asked, which a trace can't.
    if local_size is None or query_len != kv_len or torch.compiler.is_compiling():
        return None
    kinds = [MaskKind(True, local_size), MaskKind(False, local_size), MaskKind(False, local_size + 1)]
    rows, keys = torch.arange(batch, device="cpu")[:, None, None], torch.arange(kv_len, device="cpu")
    block = _Block(rows, _grid(query_len, _QUERIES)[None, :, None], keys[None, None])
    try:
        agreed = _agreeing(mask_function, [block], [(kind, Spans()) for kind in kinds])
        # Between the positions that are looked at, tokens may see each other in both directions, or a packed
        # sequence may begin, whose first token sees none in front.
        before, after = (
            sees_next(mask_function, batch, 0, kv_len - 1, "cpu", back) for back in (True, False)
        )
    except Exception:  # it looks into tensors elsewhere
        return None
    for kind, _ in agreed:
        left, right = kind.sides
        if bool(((before == (left > 0)) & (after == (right > 0))).all()):
            return kind
    return None


def kinds_of(
    mask_function: Any, local_size: int | None, prompt: Prompt, layers: Iterable[Size], exact: bool = False
) -> dict[MaskKind, Spans]:
    """The kinds of mask that ``mask_function`` may be, one or several that a prompt this short can't tell
    apart, and the spans of each.

    Args:
        mask_function: a causal one, perhaps with an overlay (bidirectional image tokens, a prefix, packed
            sequences); None = causal.
        local_size: the window or chunk that transformers gives with it, in tokens.
        prompt: the forward; padding tokens are not looked at.
        layers: window and chunk of every layer.
        exact: look everywhere in any case, for models that mark tokens of other kinds than text.

    Raises:
        UnsupportedModelError: it agrees with none, or a span of it goes on behind the prompt.
    """
    if mask_function is None or mask_function is causal_mask_function:
        return {MaskKind(): Spans()}
    local: list[Size] = [] if local_size is None else [(local_size, None), (None, local_size or None)]
    kinds = [MaskKind(True, *size) for size in dict.fromkeys([(None, None), *local, *layers])]
    causal = is_causal(mask_function)
    exact = exact and causal
    rows: Rows = whole_spans(mask_function, prompt) if exact else ()
    if causal and not exact:
        rows = find_spans(mask_function, prompt)
    found: dict[MaskKind, Spans] = {}
    if rows or exact:
        found = _everywhere(mask_function, prompt, rows, kinds)
    if not rows and (not exact or prompt.first == 0):  # else the grid would show what was before
        on_grid = _on_a_grid(mask_function, prompt, kinds)
        found = {kind: Spans() for kind in on_grid if not exact or kind in found}
    if found:
        return found
    raise UnsupportedModelError(
        "the model combines its causal mask with another one (image tokens, a prefix, packed sequences?), "
        f"which paged attention does not express (local_size={local_size}); use PagedCache(..., dense=True)"
    )


def whole_spans(mask_function: Any, prompt: Prompt) -> Rows:
    """`find_spans` of a model that marks tokens of other kinds than text.

    Raises:
        UnsupportedModelError: there are some behind others in the cache, or one goes on behind the prompt.
    """
    _require_first_forward(mask_function, prompt)
    rows = find_spans(mask_function, prompt)
    if _cuts_a_span(mask_function, prompt):
        raise UnsupportedModelError(
            f"the prompt ends at position {prompt.end}, inside an image or another span of tokens that "
            "see each other in both directions, so that its tokens would not see the rest of it; give "
            "the whole span to one forward (prefill_chunk_size=None, or chunks that end between spans)"
        )
    return rows


def _require_first_forward(mask_function: Any, prompt: Prompt) -> None:
    """Refuse spans in a later forward of a cache, wherever they are: transformers reads the types of tokens
    by their positions, and generate() gives it those of the new tokens alone."""
    if prompt.first == 0:
        return
    if bool(sees_next(mask_function, prompt.rows, 0, prompt.end - 1, prompt.device).any()):
        raise UnsupportedModelError(
            "tokens that see each other in both directions (images, by their types) behind others in the "
            "cache: transformers reads the types by position, and may have those of the new tokens alone; "
            "call cache.reset() and give all to one forward, or new text without types"
        )


def find_spans(mask_function: MaskFunction, prompt: Prompt) -> Rows:
    """The runs of tokens that see the one behind them; empty if no row has any. Reads the device once."""
    seen = sees_next(mask_function, prompt.rows, prompt.first, prompt.length - 1, prompt.device).tolist()
    found: list[tuple[tuple[int, int], ...]] = []
    for row, start in zip(seen, prompt.padding or [0] * prompt.rows, strict=True):
        spans: list[tuple[int, int]] = []
        for position, more in enumerate(row, prompt.first):
            if more and position >= start:
                joins = bool(spans) and spans[-1][1] == position + 1
                first = spans.pop()[0] if joins else position
                spans.append((first, position + 2))
        found.append(tuple(spans))
    return tuple(found) if any(found) else ()


def _cuts_a_span(mask_function: MaskFunction, prompt: Prompt) -> bool:
    """Whether the prompt's last query sees the key behind it, which only a later forward brings."""
    try:
        return bool(sees_next(mask_function, prompt.rows, prompt.end - 1, 1, prompt.device).any())
    except Exception:  # a mask over the prompt's own tokens can't be asked
        return False


def _everywhere(
    mask_function: Any, prompt: Prompt, rows: Rows, kinds: Sequence[MaskKind]
) -> dict[MaskKind, Spans]:
    """The kinds that agree at every query and key, with their spans; chunks have none."""
    spans = [Spans(rows, windowed=False), Spans(rows)] if rows else [Spans()]
    kinds = [kind for kind in kinds if kind.window != 0 and not (rows and kind.chunk)]
    candidates = [(kind, each) for each in spans for kind in kinds]
    return dict(_agreeing(mask_function, _all_blocks(prompt, rows), candidates))


def _all_blocks(prompt: Prompt, rows: Rows) -> Iterator[_Block]:
    for row, start in enumerate(prompt.padding or [0] * prompt.rows):
        keys = torch.arange(start, prompt.end, device=prompt.device)
        ends, inside = keys + 1, torch.zeros_like(keys, dtype=torch.bool)
        for first, end in rows[row] if rows else ():
            ends[first - start : end - start] = end
            inside[first - start : end - start] = True
        at = torch.full((), row, device=prompt.device)
        for begin in range(max(prompt.first - start, 0), len(keys), _AT_ONCE):
            part = slice(begin, begin + _AT_ONCE)
            yield _Block(at, keys[part, None], keys[None], start, ends[part, None], inside[part, None])


def _on_a_grid(mask_function: Any, prompt: Prompt, kinds: Sequence[MaskKind]) -> list[MaskKind]:
    """The kinds that agree at some positions of every row."""
    candidates = [(kind, Spans()) for kind in [*kinds, MaskKind(False)]]
    # Further than the prompt, so that a window shows that is longer than it; a mask over the prompt's own
    # tokens can't be asked there.
    reach = max([prompt.length, *(2 * (size or 0) + 2 for kind in kinds for size in kind[1:])])
    for length in dict.fromkeys((reach, prompt.length)):
        try:
            agreed = _agreeing(mask_function, _grid_blocks(length, prompt), candidates)
        except Exception:
            if length == prompt.length:
                raise
            continue
        if agreed:
            return [kind for kind, _ in agreed]
    return []


def _grid_blocks(length: int, prompt: Prompt) -> Iterator[_Block]:
    """One for each padding that a row has."""
    rows = {padding: row for row, padding in enumerate(prompt.padding)} or {0: 0}
    for padding, row in rows.items():
        places = (_grid(length - padding, _GRID) + padding).to(prompt.device)
        if len(places):
            yield _Block(torch.full((), row, device=prompt.device), places[:, None], places[None], padding)


def _grid(length: int, most: int) -> Tensor:
    """Positions to look at: both ends and an even spread, ``[count]`` int64, at most so many."""
    count = min(max(length, 0), most)
    spread = sorted({(length - 1) * i // max(count - 1, 1) for i in range(count)})
    return torch.tensor(spread, dtype=torch.int64, device="cpu")
