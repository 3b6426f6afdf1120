"""Reading HuggingFace's masks on the host: what paging can express (causality, window, chunk, left padding),
and refusing the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from torchpaged.custom_ops.attention.mask import visible_keys
from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.hf.spans import Prompt, Rows, Size, Spans, agreeing, cuts_a_span, find_spans, sees_next

_PROBE = 96  # query and key positions looked at, at most, on each axis


class MaskKind(NamedTuple):
    """A mask that paged attention applies by itself. ``window`` and ``chunk`` in tokens, None = off."""

    causal: bool = True
    window: int | None = None
    chunk: int | None = None


def is_causal(mask_function: Any) -> bool:
    """Whether transformers' mask function is one of its causal ones; by identity, as compiled code can
    tell it."""
    return mask_function is not bidirectional_mask_function


def left_padding(mask: Tensor, todo: str = "") -> list[int]:
    """Padding tokens at the start of each row of a 2-D mask ``[batch, length]`` (nonzero = token).

    ``todo``: what to do about a hole, for the message.

    Raises:
        ArgumentError: a hole after the first token: right padding, or padding in the middle.
    """
    if mask.dim() != 2:
        raise ArgumentError(
            "attention_mask", "a 2-D mask [batch, length] with a PagedCache", f"shape {list(mask.shape)}"
        )
    present = mask.bool().cpu()
    padding = (present.cumsum(-1) == 0).sum(-1)
    holes = ~present & (torch.arange(mask.shape[1], device="cpu")[None] >= padding[:, None])
    if bool(holes.any()):
        row, column = holes.nonzero()[0].tolist()
        raise ArgumentError(
            "attention_mask",
            "left padding only (tokenizer.padding_side = 'left')",
            f"a zero after row {row}'s first token, at position {column}",
            todo,
        )
    return [int(p) for p in padding]


def kinds_of(
    mask_function: Any,
    local_size: int | None,
    prompt: Prompt,
    layers: Iterable[Size],
    exact: bool = False,
) -> dict[MaskKind, Spans]:
    """The kinds of mask that ``mask_function`` may be, one or several that a prompt this short can't tell
    apart, and the spans beside each.

    The function is opaque (a causal one, or one with an overlay: bidirectional image tokens, a prefix, packed
    sequences), so it is asked: on a grid of positions of every row it must agree with a mask that paged
    attention can apply, and where a query sees the key behind it, everywhere.

    Args:
        mask_function: transformers' ``(batch, head, query, key) -> bool`` over positions, padding included;
            None = causal.
        local_size: the window or chunk that transformers gives beside it, in tokens.
        prompt: the forward; padding tokens are not looked at.
        layers: window and chunk of every layer.
        exact: look everywhere in any case, for models that mark tokens of other kinds than text.

    Raises:
        UnsupportedModelError: it agrees with none, or a span of it goes on behind the prompt.
    """
    local = [] if local_size is None else [(local_size, None), (None, local_size or None)]
    pairs = list(dict.fromkeys([(None, None), *local, *layers]))
    if mask_function is None or mask_function is causal_mask_function:
        return {MaskKind(): Spans()}
    rows: Rows = ()
    if exact and is_causal(mask_function):
        _require_first_forward(mask_function, prompt)
    if is_causal(mask_function):
        rows = find_spans(mask_function, prompt)
        if exact and cuts_a_span(mask_function, prompt):
            raise UnsupportedModelError(
                f"the prompt ends at position {prompt.end}, inside an image or another span of tokens that "
                "see each other in both directions, so that its tokens would not see the rest of it; give "
                "the whole span to one forward (prefill_chunk_size=None, or chunks that end between spans)"
            )
    if rows:
        found = _everywhere(mask_function, prompt, rows, pairs)
    elif exact and is_causal(mask_function):
        found = _everywhere(mask_function, prompt, rows, pairs)
        if prompt.first == 0:  # else the grid would show what was before
            found = dict.fromkeys(found.keys() & _on_a_grid(mask_function, prompt, pairs), Spans())
    else:
        found = dict.fromkeys(_on_a_grid(mask_function, prompt, pairs), Spans())
    if found:
        return found
    raise UnsupportedModelError(
        "the model combines its causal mask with another one (image tokens, a prefix, packed sequences?), "
        f"which paged attention does not express (local_size={local_size}); use PagedCache(..., dense=True)"
    )


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


def _everywhere(mask_function: Any, prompt: Prompt, rows: Rows, sizes: list[Size]) -> dict[MaskKind, Spans]:
    sizes = [size for size in sizes if size[0] != 0]
    candidates = [Spans(rows, windowed=False), Spans(rows)] if rows else [Spans()]
    found: dict[MaskKind, Spans] = {}
    for spans, agrees in zip(candidates, agreeing(mask_function, prompt, candidates, sizes), strict=True):
        for size, agreed in zip(sizes, agrees, strict=True):
            if agreed:
                found[MaskKind(True, *size)] = spans
    return found


def _on_a_grid(mask_function: Any, prompt: Prompt, sizes: list[Size]) -> set[MaskKind]:
    """The kinds that agree at some positions of every row."""
    candidates = {MaskKind(True, *size) for size in sizes} | {MaskKind(False)}
    # Further than the prompt, so that a window shows that is longer than it; a mask over the prompt's own
    # tokens can't be asked there.
    reach = max([prompt.length, *(2 * (size or 0) + 2 for pair in sizes for size in pair)])
    for length in dict.fromkeys((reach, prompt.length)):
        try:
            kinds = _agreeing(mask_function, length, prompt.padding, candidates, prompt.device)
        except Exception:
            if length == prompt.length:
                raise
            continue
        if kinds:
            return kinds
    return set()


def _agreeing(
    mask_function: Any,
    length: int,
    padding: Sequence[int],
    candidates: set[MaskKind],
    device: torch.device | str,
) -> set[MaskKind]:
    kinds = set(candidates)
    for pad, row in {pad: row for row, pad in enumerate(padding)}.items() if padding else [(0, 0)]:
        positions = _grid(length - pad)
        if len(positions):
            got = _ask(mask_function, row, (positions + pad).to(device))
            kinds = {kind for kind in kinds if torch.equal(got, _want(kind, positions))}
    return kinds


def _grid(length: int) -> Tensor:
    """Positions to look at: both ends and an even spread, ``[count]`` int64."""
    count = min(max(length, 0), _PROBE)
    return torch.tensor(
        sorted({(length - 1) * i // max(count - 1, 1) for i in range(count)}), dtype=torch.int64, device="cpu"
    )


def _ask(mask_function: Any, row: int, positions: Tensor) -> Tensor:
    """Whether query position (down) sees key position (across), ``[count, count]`` bool."""
    batch, head = positions.new_tensor(row), positions.new_tensor(0)
    count = len(positions)
    try:
        seen = mask_function(batch, head, positions[:, None], positions[None, :])
        got = torch.as_tensor(seen, device="cpu").expand(count, count)
    except Exception:  # a function of single positions, as vmap would call it
        each = [mask_function(batch, head, q, k) for q in positions for k in positions]
        got = torch.stack([torch.as_tensor(one, device=positions.device) for one in each]).view(count, count)
    return got.bool().cpu()


def _want(kind: MaskKind, positions: Tensor) -> Tensor:
    if kind.window == 0:  # what some configs make of a window that no layer uses: nothing is seen
        return torch.zeros(len(positions), len(positions), dtype=torch.bool, device="cpu")
    window = -1 if kind.window is None else kind.window - 1
    seen: Tensor = visible_keys(positions, int(positions[-1]) + 1, kind.causal, window, -1, kind.chunk or 0)[
        :, positions
    ]
    return seen
