"""PackedSteps: batches of tokens built from host lists, and the model run over them: every prefill, and
decodes without graphs.

    steps = PackedSteps(model)
    logits = steps.prefill([(sequence, 512)])    # of the sequences whose prompt ends with the chunk
    logits = steps.decode(sequences)
    tokens = steps.sample(logits, sequences)     # waits for them

Prefills that have a graph (`PrefillGraphs`) are replayed, everything else is launched from Python. Steps
never overlap: all share the model's session.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from torchpaged.engine.model import PagedModelProtocol
from torchpaged.engine.sampling import sample, seen_tokens
from torchpaged.engine.sequence import Sequence
from torchpaged.engine.step_graphs import PrefillGraphs
from torchpaged.metadata import AttentionMetadata, HostLengths
from torchpaged.metadata.host import to_device
from torchpaged.prefixes import AutomaticPrefixes
from torchpaged.profiling import range as profile_range


class PackedSteps:
    """Steps of ``model`` outside the decode loop's graphs.

    Args:
        model: the paged model.
        graphs: of its prefills; None: all are launched from Python.
        prefixes: who finds the groups of `decode`; None: requests are read one by one.
    """

    def __init__(
        self,
        model: PagedModelProtocol,
        graphs: PrefillGraphs | None = None,
        prefixes: AutomaticPrefixes | None = None,
    ) -> None:
        self._model, self._device, self._graphs = model, torch.device(model.device), graphs
        self._prefixes = prefixes

    def decode(self, sequences: list[Sequence]) -> Tensor:
        """One token each: logits ``[len(sequences), vocab_size]``."""
        ids = [s.token_at(len(s) - 1) for s in sequences]
        with profile_range("decode", batch=len(ids), tokens=len(ids)):
            seq_lens, tables = [len(s) for s in sequences], [s.blocks for s in sequences]
            width = None if self._prefixes is None else self._prefixes.max_blocks_per_req
            metadata = self._metadata([1] * len(ids), seq_lens, tables, width)
            if self._prefixes is not None:
                metadata = self._prefixes.prepare(metadata, tables, seq_lens)
            return self._model(self._longs(ids), metadata, None)

    def prefill(self, chunks: list[tuple[Sequence, int]]) -> Tensor:
        """The next ``count`` tokens of each prompt: logits ``[n, vocab_size]`` of the ``n`` sequences that
        are complete with them, valid until the next step: they may be a graph's memory."""
        ids = [token for s, count in chunks for token in s.tokens[s.num_computed : s.num_computed + count]]
        query_lens = [count for _, count in chunks]
        seq_lens, tables = [s.num_computed + count for s, count in chunks], [s.blocks for s, _ in chunks]
        ends, last = [], -1
        for sequence, count in chunks:
            last += count
            if count == sequence.remaining:
                ends.append(last)
        bucket = None if self._graphs is None else self._graphs.bucket_for(len(chunks), len(ids))
        if self._graphs is not None and bucket is not None:
            with profile_range("prefill", batch=len(chunks), tokens=len(ids), padded=bucket):
                return self._graphs.run(ids, query_lens, seq_lens, tables, ends)
        with profile_range("prefill", batch=len(chunks), tokens=len(ids)):
            return self._model(
                self._longs(ids), self._metadata(query_lens, seq_lens, tables), self._longs(ends)
            )

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[int]:
        """The next token of each sequence from ``logits [len(sequences), vocab_size]``."""
        with profile_range("sample", batch=len(sequences)):
            params = [sequence.sampling for sequence in sequences]
            penalised = any(p.repetition_penalty != 1.0 for p in params)
            seen = seen_tokens([s.tokens for s in sequences], logits.shape[1]) if penalised else None
            seeds, counters = [s.seed for s in sequences], [len(s.output) for s in sequences]
            tokens: list[int] = sample(
                logits, params, seeds, counters, seen, ops=self._model.session.ops
            ).tolist()
            return tokens

    def _longs(self, numbers: Seq[int]) -> Tensor:
        return to_device(numbers, torch.int64, self._device)

    def _metadata(
        self,
        query_lens: list[int],
        seq_lens: list[int],
        tables: list[list[int]],
        width: int | None = None,
    ) -> AttentionMetadata:
        cache = self._model.kv_cache
        metadata = AttentionMetadata.from_lists(
            query_lens,
            seq_lens,
            tables,
            block_size=cache.block_size,
            num_blocks=cache.num_blocks,
            max_blocks_per_req=width,
            device=self._device,
        )
        if self._model.session.plans:
            self._model.session.plan(metadata, HostLengths(query_lens, seq_lens))
        return metadata
