"""RowState: what a request brings into a row of `DecodeRows`, and its form on the way to the device.

    state = RowState(input_id=5, seq_len=17, blocks=[1, 2], seed=7, counter=0, remaining=64)
    state.check(block_size=16, max_blocks_per_req=128)
    state.packed(block_size=16)     # HEAD_WORDS words of 4 bytes; blocks and seen bits travel with them
    packed_rows({3: state}, block_size=16, max_blocks_per_req=128, num_seen_words=0)    # all of them

Numbers that do not fit their fields are refused where they are taken from a user
(`torchpaged.engine.SamplingParams`).
"""

import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.words import repr_of_fields
from torchpaged.metadata.host import slot_of, to_device

#: Token ids that can end a row on the device; the caller looks after further ones.
MAX_STOP_TOKEN_IDS = 16

#: Fields of a row by width.
LONGS = ("input_ids", "positions", "slot_mapping", "seeds", "counters")
INTS = ("seq_lens", "remaining", "top_k")
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty")
_HEAD = struct.Struct(f"={len(LONGS) + MAX_STOP_TOKEN_IDS}q{len(INTS)}i{len(FLOATS)}f")
#: Words of 4 bytes of a packed row.
HEAD_WORDS = _HEAD.size // 4


@dataclass(frozen=True)
class RowState:
    """What a request brings into its row.

    Attributes:
        input_id: its newest token.
        seq_len: KV tokens, this token included.
        blocks: the blocks it owns, in order; at least one beyond the token's need per step that will run.
        seed, counter: of its random draws (`sample_tokens`): key, and number of the next token.
        remaining: tokens it may still produce.
        temperature, top_k, top_p, min_p, repetition_penalty: as in ``sample_tokens``.
        stop_token_ids: ids that end it; the first `MAX_STOP_TOKEN_IDS` are seen on the device.
        seen: ids that a repetition penalty applies to; None with a penalty of 1: the row's bits are of no
            meaning then.
        logits_words: what it asks of logits in front of sampling, as `LogitsStage.process` takes it.
    """

    input_id: int
    seq_len: int
    blocks: Sequence[int]
    seed: int
    counter: int
    remaining: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: Sequence[int] = ()
    seen: Sequence[int] | None = None
    logits_words: Sequence[int] = ()

    __repr__ = repr_of_fields

    def check(self, block_size: int, max_blocks_per_req: int) -> None:
        """Refuse, with an `ArgumentError`, what a row can't hold."""
        need = -(-self.seq_len // block_size)
        if self.seq_len < 1 or not need <= len(self.blocks) <= max_blocks_per_req:
            raise ArgumentError(
                "states",
                f"seq_len of at least 1 within its blocks, at most {max_blocks_per_req} of them",
                f"seq_len {self.seq_len}, {len(self.blocks)} blocks",
            )
        if min(self.blocks) < 1:
            raise ArgumentError(
                "states", "blocks from 1 on (block 0 is the null block)", f"block {min(self.blocks)}"
            )
        if len(set(self.blocks)) < len(self.blocks):
            raise ArgumentError("states", "every block once", f"a block several times: {list(self.blocks)}")
        if self.repetition_penalty != 1.0 and self.seen is None:
            raise ArgumentError(
                "states",
                "seen with a repetition penalty",
                "seen=None",
                "give the tokens that occurred, () for none",
            )

    def packed(self, block_size: int) -> bytes:
        """The row's fields as `HEAD_WORDS` words: longs, stop ids, ints, floats, each in the order
        of `DecodeRows`."""
        last = self.seq_len - 1
        stops = list(self.stop_token_ids)[:MAX_STOP_TOKEN_IDS]
        seed = (self.seed + 2**63) % 2**64 - 2**63
        return _HEAD.pack(
            self.input_id,
            last,
            slot_of(last, self.blocks, block_size),
            seed,
            self.counter,
            *stops,
            *([-1] * (MAX_STOP_TOKEN_IDS - len(stops))),
            self.seq_len,
            self.remaining,
            self.top_k,
            self.temperature,
            self.top_p,
            self.min_p,
            self.repetition_penalty,
        )


def token_bits(tokens: Sequence[int], num_words: int) -> Tensor:
    """``[num_words]`` int32 with bit ``t % 32`` of word ``t // 32`` set for every token ``t``."""
    flags = torch.zeros(num_words * 32, dtype=torch.int64, device="cpu")
    flags[to_device(tokens, torch.int64, "cpu")] = 1
    return (flags.view(-1, 32) << torch.arange(32, device="cpu")).sum(-1).to(torch.int32)


def packed_rows(
    states: Mapping[int, RowState],
    block_size: int,
    max_blocks_per_req: int,
    num_seen_words: int,
    num_logits_words: int = 0,
    pin_memory: bool = False,
) -> Tensor:
    """Rows on their way to the device, a line each: ``[len(states), words]`` int32 on the host.

    A line holds the row's number as an integer of two words, `RowState.packed`, ``max_blocks_per_req``
    blocks, those past the request's own 0, ``num_logits_words``, ``num_seen_words`` of `token_bits`, 0 where
    the state has no ``seen``, and perhaps a word more: their number is even.
    """
    begin = 2 + HEAD_WORDS
    behind = begin + max_blocks_per_req
    seen = behind + num_logits_words
    end = seen + num_seen_words
    words = array("i", bytes(4 * len(states) * (end + end % 2)))
    lines = torch.frombuffer(words, dtype=torch.int32).view(len(states), -1)
    for line, (row, state) in enumerate(states.items()):
        first = line * lines.shape[1]
        words[first] = row
        words[first + 2 : first + begin] = array("i", state.packed(block_size))
        words[first + begin : first + begin + len(state.blocks)] = array("i", state.blocks)
        words[first + behind : first + behind + len(state.logits_words)] = array("i", state.logits_words)
        if state.seen is not None:
            lines[line, seen:end] = token_bits(state.seen, num_seen_words)
    return lines.pin_memory() if pin_memory else lines
