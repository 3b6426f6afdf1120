"""CallMask: what the mask of one call holds, asked of the mask by `held_by`.

transformers gives an attention function the mask and nothing else of what its mask function was told, so that
the mask itself carries it, from one function of ours to the other. Without a paged cache it is the very mask
that transformers would have made. With one it is a placeholder, that is never looked into: transformers hands
a ready mask of four dimensions on as it is, from the ``prepare_inputs_for_generation`` that asks for masks
ahead of a forward to every layer of it. ``tests/hf/test_call_mask.py`` notices an attention function that is
told more.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.cache_rows import CacheRows
from torchpaged.hf.mask_functions import kind_without_cache
from torchpaged.hf.mask_kinds import MaskKind, Prompt, Spans
from torchpaged.hf.query_starts import pin_batch


class MaskRequest(NamedTuple):
    """The arguments of transformers' mask function, see `torchpaged.hf.attention.paged_mask`."""

    batch: int
    query_len: int
    kv_len: int
    padding: Tensor | None = None  # 2-D ``[batch, length]``, nonzero = token
    mask_function: Any = None
    local_size: int | None = None
    q_offset: Any = 0
    kv_offset: Any = 0
    device: Any = "cpu"

    def arguments(self) -> dict[str, Any]:
        """Those that each of transformers' own mask functions takes; the device is among its further ones."""
        return {
            "batch_size": self.batch,
            "q_length": self.query_len,
            "kv_length": self.kv_len,
            "q_offset": self.q_offset,
            "kv_offset": self.kv_offset,
            "mask_function": self.mask_function,
            "attention_mask": self.padding,
        }


class CallMask:
    """What a mask holds: its kind, padding, and spans of tokens that see each other in both directions.

    Args:
        model_type: of the config that it was made for.
        kinds: the kinds of mask that it may be, each with its spans.
        prompt: the forward whose queries it is for.
        kv_len: keys per row; of a paged cache 0.
        present: ``[batch, kv_len]`` bool, the keys that are no padding; None = all of them. Of a paged cache
            the prompt has the padding.
        rows: of the paged cache whose forward it is; None: there is none.

    Attributes:
        model_type, kinds, prompt, kv_len, rows: as given.
        made: what attention made of it, by what that depends on: one mask serves all layers.
        starts, lens: ``[batch]`` int32, the first key of each row and how many there are, once `are_spans`
            was asked; None where no row has padding.
        all_at_zero: likewise, whether every row's keys start at 0; None where it can't be read, as in a
            trace.
        some_empty: likewise, whether a row has no keys; False where it can't be read.
    """

    def __init__(
        self,
        model_type: str,
        kinds: Mapping[MaskKind, Spans],
        prompt: Prompt,
        kv_len: Any = 0,
        present: Tensor | None = None,
        rows: CacheRows | None = None,
    ) -> None:
        self.model_type, self.kinds, self.prompt, self.kv_len = model_type, kinds, prompt, kv_len
        self._present, self.rows = present, rows
        self.made: dict[Any, Any] = {}
        self.starts: Tensor | None = None
        self.lens: Tensor | None = None
        self.all_at_zero: bool | None = True
        self.some_empty = False
        self._are_spans: bool | None = True if present is None else None

    @property
    def kind(self) -> MaskKind | None:
        """Of a mask that is of one; None: it may be of several."""
        return next(iter(self.kinds)) if len(self.kinds) == 1 else None

    @property
    def is_padded(self) -> bool:
        """Whether some row may have padding, of a mask without a cache."""
        return self._present is not None

    @property
    def has_spans(self) -> bool:
        """Whether tokens see each other in both directions."""
        return any(spans.rows for spans in self.kinds.values())

    def are_spans(self) -> bool:
        """Whether each row's keys stand side by side; looks at the mask once, and in a trace asserts it on
        the device."""
        if self._are_spans is None and self._present is not None:
            present = self._present
            spans = ((present[:, 1:] & ~present[:, :-1]).sum(-1) + present[:, 0].int() <= 1).all()
            self.starts = present.int().argmax(-1).int()
            self.lens = present.sum(-1, dtype=torch.int32)
            if _is_traced(present):
                self._are_spans, self.all_at_zero = True, None
                torch._assert_async(
                    spans,
                    "attention_mask: expected rows whose tokens stand side by side, got a hole between two; "
                    "run the model uncompiled, where such masks go another way",
                )
            else:
                self._are_spans, self.some_empty = bool(spans), not bool(self.lens.all())
                self.all_at_zero = not bool(self.starts.any())
        return bool(self._are_spans)

    def pinned_lens(self) -> Tensor:
        """``lens`` for a kernel that may read them early, of rows that `are_spans` was asked of."""
        if "lens" not in self.made:
            assert self.lens is not None and self.starts is not None
            self.made["lens"] = pin_batch(self.starts, self.lens, self.starts)[1]
        lens: Tensor = self.made["lens"]
        return lens

    def require_forward(self, batch: int, query_len: int) -> None:
        """Refuse another forward of the paged cache than the one that the mask was made for, or its last
        queries."""
        of, rows = self.prompt, self.rows
        assert rows is not None
        first = rows.first_position(of.length)
        padding = list(of.padding) if any(of.padding) else None
        known = rows.padding if rows.padding and any(rows.padding) else None
        if batch != of.rows or query_len > of.length or first not in (None, of.first) or padding != known:
            raise UnsupportedModelError(
                f"{self.model_type} runs {batch} rows of {query_len} tokens from position {first} on with a "
                f"mask that was made for {of.rows} rows of {of.length} from position {of.first} on"
                + (f", with left padding {padding} where the cache has {known}" if padding != known else "")
            )

    @torch.compiler.disable(reason="Dynamo gives a view for what it makes of a subclass, and takes none")
    def placeholder(self) -> Tensor:
        """A mask ``[1, 1, query_len, 1]`` that carries this and says nothing by itself."""
        nothing = torch.zeros((1, 1, self.prompt.length, 1), dtype=torch.bool, device=self.prompt.device)
        # Not `as_subclass`, which makes a view: Dynamo takes none of a subclass. Private, and how torch
        # itself makes an `nn.Parameter`; tests/hf/test_compiled_forwards.py notices its change.
        return carry(Tensor._make_subclass(_Placeholder, nothing), self)


class _Placeholder(Tensor):
    """A mask that gives what it carries to its own last queries and to copies; not to anything else that is
    made of it, which attention then refuses."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` on plain tensors; mark what is still a mask of the same forward."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or result is args[0]:
            return result
        kept = func in (Tensor.to, Tensor.contiguous, Tensor.clone, Tensor.detach)
        if kept or (func is Tensor.__getitem__ and _is_end(args[1])):
            return carry(result.as_subclass(_Placeholder), args[0]._torchpaged_holds)
        return result.as_subclass(Tensor)


def _is_end(index: Any) -> bool:
    """Whether ``index`` takes the last queries of a mask, ``[:, :, -n:, :]``."""
    if not isinstance(index, tuple) or len(index) != 4 or not all(isinstance(x, slice) for x in index):
        return False
    queries = index[2]
    full = all(x == slice(None) for x in (*index[:2], index[3]))
    return full and queries.stop is None and queries.step is None and (queries.start or -1) < 0


def carry(mask: Tensor, holds: CallMask) -> Tensor:
    """``mask``, of which `held_by` then says what it holds."""
    mask._torchpaged_holds = holds  # type: ignore[attr-defined]
    return mask


def held_by(mask: Tensor | None) -> CallMask | None:
    """What ``mask`` holds; None for one that is not of our mask function, or none."""
    return getattr(mask, "_torchpaged_holds", None)


def describe(mask: Tensor, asked: MaskRequest, model_type: str) -> None:
    """Have a mask ``[batch, 1, query_len, kv_len]`` that transformers made for ``asked`` carry what it holds,
    if that says the same; else leave it as it is. Only masks without offsets are described."""
    if mask.dim() != 4 or any(not isinstance(x, int) or x for x in (asked.q_offset, asked.kv_offset)):
        return
    batch, (query_len, kv_len) = mask.shape[0], mask.shape[-2:]
    kind = kind_without_cache(asked.mask_function, asked.local_size, batch, query_len, kv_len)
    if kind is None or (asked.padding is not None and tuple(asked.padding.shape) != (batch, kv_len)):
        return
    present = None if asked.padding is None else asked.padding.bool()
    carry(mask, CallMask(model_type, {kind: Spans()}, Prompt(batch, 0, query_len), kv_len, present))


def _is_traced(tensor: Tensor) -> bool:
    """Whether values can't be looked at: in a trace, or in a capture."""
    return torch.compiler.is_compiling() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
