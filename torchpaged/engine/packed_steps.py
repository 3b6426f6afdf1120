"""PackedSteps: batches of tokens built from host lists, and the model run over them: every chunk of a prompt,
with decodes in front of them or without, and decodes without graphs.

    steps = PackedSteps(model, rows)
    logits = steps.prefill([(sequence, 512)])    # of the sequences whose prompt ends with the chunk
    logits = steps.prefill([(sequence, 512)], decodes)
    logits = steps.decode(sequences)
    drawn = steps.sample(logits, sequences)      # waits for them

Steps with chunks that have a graph (`PrefillGraphs`) are replayed, everything else is launched from Python.
Steps never overlap: all share the model's session.
"""

from array import array
from collections.abc import Sequence as Seq
from functools import partial

import torch
from torch import Tensor

from torchpaged.engine.decode_loop import row_state
from torchpaged.engine.device import DecodeRows, TokenLogprobs
from torchpaged.engine.model import PagedModelProtocol
from torchpaged.engine.one_request import OneRequestGraphs
from torchpaged.engine.sequence import Sequence
from torchpaged.engine.step_graphs import PrefillGraphs
from torchpaged.graphs.capture import Captured
from torchpaged.graphs.packed_buffers import PackedBatch
from torchpaged.metadata import AttentionMetadata, HostLengths
from torchpaged.metadata.host import to_device
from torchpaged.prefixes import AutomaticPrefixes
from torchpaged.profiling import range as profile_range


class PackedSteps:
    """Steps of ``model`` outside the decode loop's graphs.

    Args:
        model: the paged model.
        rows: in which tokens are drawn.
        graphs: of its prefills; None: all are launched from Python.
        prefixes: what finds the groups of `decode`; None: requests are read one by one.
        from_rows: decodes of `prefill` have their newest tokens in ``rows``; False: the host knows them.

    Attributes:
        end: the graph that draws a token for row 0 from what `prefill` gave last; None: there is none.
    """

    def __init__(
        self,
        model: PagedModelProtocol,
        rows: DecodeRows,
        graphs: PrefillGraphs | None = None,
        prefixes: AutomaticPrefixes | None = None,
        from_rows: bool = False,
    ) -> None:
        self._model, self._device, self._graphs = model, torch.device(model.device), graphs
        self._prefixes, self._rows, self._from_rows = prefixes, rows, from_rows
        self.end: Captured | None = None

    def decode(self, sequences: list[Sequence]) -> Tensor:
        """One token each: logits ``[len(sequences), vocab_size]``."""
        ids = [s.tokens[-1] for s in sequences]
        with profile_range("decode", batch=len(ids), tokens=len(ids)):
            seq_lens, tables = [len(s.tokens) for s in sequences], [s.blocks for s in sequences]
            width = None if self._prefixes is None else self._prefixes.max_blocks_per_req
            metadata = self._metadata([1] * len(ids), seq_lens, tables, width)
            if self._prefixes is not None:
                metadata = self._prefixes.prepare(metadata, tables, seq_lens)
            return self._model(self._longs(ids), metadata, None)

    def prefill(self, chunks: list[tuple[Sequence, int]], decodes: Seq[Sequence] = ()) -> Tensor:
        """The next ``count`` tokens of each prompt, and in the same pass one token of each of ``decodes``.

        Returns:
            Logits ``[n, vocab_size]`` of ``decodes``, and behind them of the sequences that are complete with
            their chunk. Valid until the next step: they may be a graph's memory.
        """
        num_tokens = len(decodes) + sum(count for _, count in chunks)
        said = {"batch": len(decodes) + len(chunks), "tokens": num_tokens}
        said |= {"decodes": len(decodes)} if decodes else {}
        fill = partial(self._fill, decodes) if self._from_rows and decodes else None
        found = None if self._graphs is None else self._graphs.runner_for(said["batch"], num_tokens)
        self.end = None
        if found is not None:
            runner, bucket = found
            self.end = runner.end_of(bucket) if isinstance(runner, OneRequestGraphs) else None
            filled = len(decodes) if fill is not None else 0
            lists = self._lists(chunks, [] if filled else decodes, filled)
            with profile_range("prefill", **said, padded=bucket):
                return runner.run_known(PackedBatch(*lists, filled=filled), fill)
        ids, query_lens, seq_lens, tables, ends = self._lists(chunks, decodes)
        with profile_range("prefill", **said):
            width = None if fill is None else self._rows.max_blocks_per_req
            input_ids, metadata = self._longs(ids), self._metadata(query_lens, seq_lens, tables, width)
            if fill is not None:
                fill(input_ids, metadata)
            return self._model(input_ids, metadata, self._longs(ends))

    def replays(self, chunks: list[tuple[Sequence, int]], decodes: Seq[Sequence]) -> bool:
        """Whether `prefill` of these runs nothing of the model in Python."""
        num_tokens = len(decodes) + sum([count for _, count in chunks])
        return self._graphs is not None and self._graphs.replays(len(decodes) + len(chunks), num_tokens)

    def _lists(
        self, chunks: list[tuple[Sequence, int]], decodes: Seq[Sequence], filled: int = 0
    ) -> "tuple[array[int], list[int], list[int], list[list[int]], list[int]]":
        """Tokens, query lengths, lengths and blocks of a batch, and which tokens' logits are wanted;
        ``filled`` further decodes stand in front of it."""
        ids, seq_lens, tables = self._newest(decodes)
        query_lens, ends = [1] * len(ids), list(range(filled + len(ids)))
        for s, count in chunks:
            ids += s.tokens[s.num_computed : s.num_computed + count]
            query_lens.append(count)
            seq_lens.append(s.num_computed + count)
            tables.append(s.blocks)
            if count == s.remaining:
                ends.append(filled + len(ids) - 1)
        return ids, query_lens, seq_lens, tables, ends

    def _newest(self, decodes: Seq[Sequence]) -> "tuple[array[int], list[int], list[list[int]]]":
        """Newest token, length and blocks of each as the host knows them. What the rows know is put over it
        by `_fill`: then this gives the last block alone, as if it were the first, since the lists of a
        large batch would cost the host more than the rest."""
        ids, lens = array("q", [s.tokens[-1] for s in decodes]), [len(s.tokens) for s in decodes]
        if not self._from_rows:
            return ids, lens, [s.blocks for s in decodes]
        size = self._model.kv_cache.block_size
        last = [[s.blocks[(n - 1) // size]] for s, n in zip(decodes, lens, strict=True)]
        return ids, [(n - 1) % size + 1 for n in lens], last

    def _fill(self, decodes: Seq[Sequence], input_ids: Tensor, metadata: AttentionMetadata) -> None:
        self._rows.copy_to([s.row for s in decodes if s.row is not None], input_ids, metadata)

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[tuple[int, dict[int, float] | None]]:
        """The next token of each sequence from ``logits [len(sequences), vocab_size]``, and its log
        probabilities where they are wanted."""
        rows, params = self._rows, [sequence.sampling for sequence in sequences]
        with profile_range("sample", batch=len(sequences)):
            rows.write({n: row_state(s) for n, s in enumerate(sequences)})
            tokens = rows.finish_rows(logits, range(len(sequences)))
            numbers: list[int] = tokens.tolist()
            if all(p.logprobs is None for p in params):
                return [(token, None) for token in numbers]
            told = TokenLogprobs(rows.stage.logprobs(logits, tokens).cpu())
            return [
                (token, None if p.logprobs is None else told.of(index, p.logprobs))
                for index, (token, p) in enumerate(zip(numbers, params, strict=True))
            ]

    def _longs(self, numbers: Seq[int]) -> Tensor:
        return to_device(numbers, torch.int64, self._device)

    def _metadata(
        self, query_lens: list[int], seq_lens: list[int], tables: list[list[int]], width: int | None = None
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
