"""Warm-up: every shape class of steps that are launched from Python, run once on padding before the first
request, so that no kernel is compiled, loaded or chosen in the middle of serving.

    forms = step_forms(max_batch_size=256, max_tokens=2048, columns=132, block_size=16)
    warm_up = WarmUp(model, rows, forms)
    warm_up.run(progress)

Kernels are compiled for shapes, dtypes and addresses, never for lengths: a step of padding takes those of any
step of its shape. It belongs to no request, takes no block, writes into no cache and draws no random number.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops import ahead, compiles
from torchpaged.custom_ops.attention.limits import MAX_DECODE_QUERY_LEN
from torchpaged.engine.device import DecodeRows
from torchpaged.engine.model import PagedModelProtocol
from torchpaged.graphs.bucketed import BucketedGraphs
from torchpaged.graphs.buckets import default_buckets
from torchpaged.graphs.capture_options import Progress
from torchpaged.metadata import AttentionMetadata
from torchpaged.metadata.fields import METADATA_FIELDS, BatchSizes, make_batch_tensors
from torchpaged.metadata.host import to_device

#: Numbers of requests besides those of the buckets: kernels for few requests are cut for their number.
_FEW = (1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 33)
_ALL_WIDTHS = (1, 2, 8, 12, 20, 33)  # those whose tables are of several widths
_LONG = MAX_DECODE_QUERY_LEN + 1  # query tokens that no decode kernel takes


class Form(NamedTuple):
    """The shape of a step: requests, their tokens together and at most, and columns of the block table."""

    num_reqs: int
    num_tokens: int
    max_query_len: int
    columns: int

    def __str__(self) -> str:
        return f"step of {self.num_reqs} requests, {self.num_tokens} tokens"


def step_forms(
    max_batch_size: int,
    max_tokens: int,
    columns: int,
    block_size: int,
    *,
    captured: int = 0,
    decodes: bool = False,
    one_prompt: bool = False,
    num_sms: int = 0,
) -> list[Form]:
    """A step of each shape class that is launched from Python, those with most tokens first; and one of
    ``max_batch_size`` requests in any case.

    Classes are cut by what kernels look at: the number of requests; whether their queries are so short that a
    decode kernel takes them all, equally long, or neither; few tokens or many; a narrow or a wide table.

    Args:
        max_batch_size: requests of a step at most.
        max_tokens: tokens of a step at most.
        columns: of the widest block table.
        block_size: tokens per block.
        captured: steps of up to so many tokens have graphs.
        decodes: with steps of one token per request, which have no graphs.
        one_prompt: a prefill step has one request.
        num_sms: multiprocessors of the GPU: decode kernels are cut by how often requests fill them.
    """
    most, least = 1 if one_prompt else min(max_batch_size, max_tokens), captured + 1
    batches = {*_FEW, *default_buckets(max_batch_size), num_sms // 2, num_sms, most}
    counts = [n for n in batches if 1 <= n <= most]
    shapes = {(n, n * q, q) for n in counts for q in (2, 4, MAX_DECODE_QUERY_LEN)}
    # linear layers are cut for few tokens, too, and for every 16 of up to 256
    shapes |= {(1, n, n) for n in (*default_buckets(64), *range(80, 257, 16))}
    shapes |= {(n, tokens := max(n - 1 + _LONG, least), tokens - n + 1) for n in counts}
    for n in _ALL_WIDTHS:
        if n <= most:
            alike = max(_LONG, -(-(least + 1) // n))
            shapes |= {(n, n * alike, alike), (n, n * alike - min(n - 1, 1), alike)}
    for tokens in (
        max_tokens,
        max_tokens - 1,
        max_tokens - max_tokens // 4,
        max_tokens // 2,
        max_tokens // 4,
    ):
        # several equal ones, and some of which one has nearly all tokens
        shapes |= {(n, tokens // n * n, tokens // n) for n in (1, 2, 16) if n <= most}
        shapes |= {(n, tokens, tokens - n + 1) for n in (2, 8) if n <= most}
    shapes = {shape for shape in shapes if shape[0] <= shape[1] and least <= shape[1] <= max_tokens}
    shapes |= {(n, n, 1) for n in (counts if decodes else [max_batch_size])}
    forms = {Form(*shape, width) for shape in shapes for width in _widths(shape, columns, block_size)}
    return sorted(forms, key=lambda form: (-form.num_tokens, form))


def _widths(shape: tuple[int, int, int], columns: int, block_size: int) -> set[int]:
    """Of tables: as wide as can be; of few requests also narrow, and both with and without a factor of 16,
    which Triton compiles for."""
    num_reqs, _, max_query_len = shape
    if num_reqs not in _ALL_WIDTHS:
        return {columns}
    least, even = -(-max_query_len // block_size), columns // 16 * 16
    if max_query_len > 64:
        return {min(least, columns), columns}
    widths = {least, least + 1, (least | 15) + 1, even - 1, even}
    return {width for width in widths if least <= width <= columns} | {columns}


class WarmUp:
    """The steps of a start.

    Args:
        model: the paged model.
        rows: in which tokens are drawn.
        forms: of the steps.
    """

    def __init__(self, model: PagedModelProtocol, rows: DecodeRows, forms: Sequence[Form]) -> None:
        self._model, self._rows, self._forms = model, rows, forms
        self._most = max(forms, key=lambda form: form.num_reqs)  # whose first tokens are drawn, too
        self._device = torch.device(model.device)

    def gather(self, graphs: Iterable[tuple[BucketedGraphs, int]], progress: Progress | None) -> int:
        """Compile side by side what the steps will launch, and those of ``graphs`` and their buckets; returns
        how many kernels were looked for. What goes wrong does so again where it counts.

        A start like one before it finds all of them stored. So every fourth step is looked at, and the others
        only if one of these lacked a kernel: what they take is loaded, or compiled, when they run.
        """
        steps: list[Callable[[], object]] = [partial(each.launch_padding, bucket) for each, bucket in graphs]
        steps += self._steps()
        compiled = compiles.count()
        with ahead.gathering() as gathered:
            self._gather(steps[::4], gathered, progress)
            if compiles.count() != compiled:
                self._gather(steps, gathered, progress)
        return len(gathered.kernels)

    def _gather(
        self, steps: list[Callable[[], object]], gathered: ahead.Gathering, progress: Progress | None
    ) -> None:
        while steps:  # of those whose op ended at its first kernel once more, for its second one
            steps = [step for step in steps if self._finds(step, gathered)]
            gathered.wait(progress)

    def _finds(self, step: Callable[[], object], gathered: ahead.Gathering) -> bool:
        """Run a step; whether it has kernels that were not known."""
        known = len(gathered.kernels)
        try:
            step()
        except Exception:
            self._model.session.reset()
        return len(gathered.kernels) > known

    def run(self, progress: Progress | None) -> int:
        """Run every step; returns how many."""
        steps = list(self._steps())
        for done, step in enumerate(steps):
            step()
            if progress is not None:
                progress(done + 1, len(steps), f"warm-up {done + 1}")
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return len(steps)

    def _steps(self) -> Iterator[Callable[[], object]]:
        return (partial(self._step, form) for form in self._forms)

    def _step(self, form: Form) -> None:
        model, session = self._model, self._model.session
        with torch.inference_mode():
            sizes = BatchSizes(form.num_reqs, form.num_tokens, form.columns)
            tensors = make_batch_tensors(METADATA_FIELDS, sizes, self._device)
            metadata = AttentionMetadata.view(
                tensors, sizes, max_query_len=form.max_query_len, block_size=model.kv_cache.block_size
            )
            try:
                if session.plans:
                    session.plan(metadata)
                zeros = to_device([0] * form.num_tokens, torch.int64, self._device)
                logits = model(zeros, metadata, zeros[: form.num_reqs])
                if form == self._most:
                    for count in default_buckets(form.num_reqs):
                        self._sample(logits[:count])
            finally:
                session.reset()

    def _sample(self, logits: Tensor) -> None:
        """First tokens of as many requests as ``logits [n, vocab_size]`` has rows."""
        with self._rows.padding(self._rows.max_batch_size):
            self._rows.finish_rows(logits, range(logits.shape[0]))
