"""StateLayer: a linear-attention layer in a paged cache, transformers' own but for what happens to its rows
between forwards. StatePast: what the last forward did to a pool of states, so that its last tokens can be
taken back: the states before it, and the op over its tokens, which is run once more over those that stay. No
matrix product is."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from torchpaged.custom_ops.checks import refuse_grad
from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.custom_ops.words import counted
from torchpaged.hf.owner import PagedOwner
from torchpaged.metadata import AttentionMetadata


class StateLayer(LinearAttentionLayer):
    """Convolution and recurrent states, ``[rows, ...]`` each, that do what a `PagedCache` does to its rows:
    they are repeated and selected too, and the batch behind a `reset` may have another size.

    Args:
        number_of_states: of each sort, that the layer keeps.
    """

    def __init__(self, number_of_states: int = 1) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        # States of a batch before `reset`, kept for compiled code that knows their addresses.
        self._left: set[tuple[str, int]] = set()

    def _kept(self) -> list[tuple[str, int]]:
        """Which states there are."""
        names = ("conv_states", "recurrent_states")
        return [(name, i) for name in names for i, there in self._there(name).items() if there]

    def _there(self, name: str) -> dict[int, bool]:
        there: dict[int, bool] = getattr(self, f"is_{name}_initialized")
        return there

    def lazy_initialization(self, **states: Any) -> None:
        """Allocate; an inference tensor could not be written under no_grad later."""
        with torch.inference_mode(False):
            LinearAttentionLayer.lazy_initialization(self, **states)

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """As transformers has it, but for gradients, which are refused: the layers of attention refuse them
        as well, when these states would have moved on."""
        refuse_grad(conv_states=conv_states)
        self._fit("conv_states", state_idx, conv_states)
        full: Tensor = LinearAttentionLayer.update_conv_state(self, conv_states, state_idx, **kwargs)
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """See `update_conv_state`."""
        refuse_grad(recurrent_states=recurrent_states)
        self._fit("recurrent_states", state_idx, recurrent_states)
        kept: Tensor = LinearAttentionLayer.update_recurrent_state(
            self, recurrent_states, state_idx, **kwargs
        )
        return kept

    def _fit(self, name: str, state_idx: int, states: Tensor) -> None:
        """The first states behind a `reset` may be of another size: those that are left are dropped then."""
        if (name, state_idx) in self._left:
            self._left.discard((name, state_idx))
            kept = getattr(self, name)[state_idx]
            wanted = (states.shape[0], states.dtype, states.device)
            self._there(name)[state_idx] = (kept.shape[0], kept.dtype, kept.device) == wanted

    def reset(self) -> None:
        """Zero the states. Those of a recorded past are what a forward computed, perhaps in inference mode,
        and go."""
        for name, i in self._kept():
            if getattr(self, name)[i].is_inference():
                self._there(name)[i] = False
        LinearAttentionLayer.reset(self)
        self._left = set(self._kept())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row ``i`` goes on from the states of row ``beam_idx[i]``; in place where there are as many."""
        for name, i in self._kept():
            states = getattr(self, name)
            with torch.inference_mode(False):
                chosen = states[i].index_select(0, beam_idx.to(states[i].device))
            if chosen.shape == states[i].shape and not states[i].is_inference():
                states[i].copy_(chosen)
            else:
                torch._dynamo.mark_static_address(chosen)
                states[i] = chosen


#: A state op: called with tokens, ``[batch * query_len, ...]`` each, and ``rows``, their slots, lengths and
#: starts, and ``max_query_len``.
StateOp = Callable[..., Tensor]


class StatePast:
    """Made before the op of a forward runs; row ``i`` has slot ``i + 1``.

    Args:
        pool: ``[num_slots, ...]``.
        run: the op, over that pool.
        tokens: its arguments with a value per token, ``[batch * query_len, ...]`` each.
        batch, query_len: of the forward.
    """

    def __init__(self, pool: Tensor, run: StateOp, tokens: tuple[Tensor, ...], batch: int, query_len: int):
        self._pool, self._run, self._tokens = pool, run, tokens
        self.batch, self.query_len = batch, query_len
        self._before = pool[1 : batch + 1].clone()

    def take_back(self, count: int, slots: Tensor, seq_lens: Tensor) -> None:
        """Leave the states as without the last ``count`` tokens of each row.

        Args:
            count: at most ``query_len``.
            slots: ``[batch]`` int32.
            seq_lens: ``[batch]`` int32, of the rows without these tokens.
        """
        self._pool[1 : self.batch + 1].copy_(self._before)
        kept = self.query_len - count
        if not kept:
            return
        options: dict[str, Any] = {"dtype": torch.int32, "device": slots.device}
        self._run(
            *(x.unflatten(0, (self.batch, -1))[:, :kept].flatten(0, 1) for x in self._tokens),
            rows=(slots, seq_lens, torch.arange(self.batch + 1, **options) * kept),
            max_query_len=kept,
        )


class TakesBack:
    """Of a layer with states per row: its ops over a step's tokens, and tokens of the last forward taken
    back.

    Attributes:
        cache, index: as those of a `torchpaged.hf.packed_state.PackedState`.
        records_past: whether tokens of the next forward can be taken back.
        past: what the last forward did to each pool; empty if nothing of it can be taken back.
    """

    cache: PagedOwner
    index: int
    past: list[StatePast]

    def forget_past(self) -> None:
        """Before another batch."""
        self.records_past, self.past = False, []

    def over_rows(
        self,
        pool: Tensor,
        run: StateOp,
        tokens: tuple[Tensor, ...],
        sizes: Sequence[int],
        step: AttentionMetadata,
    ) -> Tensor:
        """``run`` over the tokens of a step's requests, of ``sizes [batch, query_len, *]``, and what is kept
        of it."""
        rows = self.rows_of(step)
        if self.records_past and not torch.compiler.is_compiling():
            self.past.append(StatePast(pool, run, tokens, sizes[0], sizes[1]))
        return run(*tokens, rows=rows, max_query_len=step.max_query_len)

    def rows_of(self, step: AttentionMetadata) -> tuple[Tensor, Tensor, Tensor]:
        """Slots, lengths and starts of a step's requests.

        Raises:
            UnsupportedModelError: its tokens do not follow one another.
        """
        if step.features:
            raise UnsupportedModelError(
                f"{self.cache.name}: layer {self.index} keeps a state, which goes from token to token, and "
                f"the batch has a {step.features[0]}; run its branches as requests of their own"
            )
        assert self.cache.state_slots is not None
        return self.cache.state_slots[: step.num_reqs], step.seq_lens, step.query_start_loc

    def require_croppable(self, count: int = 1) -> None:
        """Refuse to take back more tokens than the last forward had, or any if it was not recorded: a state
        is that of its last token alone."""
        recorded = self.past[0].query_len if self.past else 0
        if count > recorded:
            raise UnsupportedModelError(
                f"{self.cache.name}: layer {self.index} keeps a state per row, that of its last token alone, "
                f"so that {counted(recorded, 'token')} can be taken back (crop), and not {count}; call "
                "cache.activate_past_recording() before a forward whose tokens may be, as assisted decoding "
                "does, or cache.reset() and run the tokens that stay"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Take tokens of the last forward back, see `require_croppable`; before the rows do."""
        count, past = -tokens_to_remove, self.past
        if count:
            self.require_croppable(count)
            assert self.cache.state_slots is not None
            rows = slice(past[0].batch)
            seq_lens = (self.cache.rows.seq_lens[rows] - count).clamp_min(0)
            for part in past:
                part.take_back(count, self.cache.state_slots[rows], seq_lens)
        self.past = []

    @property
    def is_croppable(self) -> bool:
        """Whether tokens of the next forward can be taken back."""
        return self.records_past

    def activate_past_recording(self) -> None:
        """Keep what it takes to take the tokens of the latest forward back, until `reset`; not of compiled
        ones."""
        self.records_past = True

    def reset(self) -> None:
        """Before another batch."""
        self.forget_past()
