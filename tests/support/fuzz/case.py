"""One fuzzed configuration: its batches run twice, compared with the oracle and with themselves, eagerly or
out of a CUDA graph.

`run_case` is a target of `worker_pool.WorkerPool`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from pool_layouts import clone_storage, memory_of, moved, strided
from torch import Tensor

from fuzz.configuration import Configuration
from fuzz.draw import random_batch, random_configuration
from fuzz.shared_prefixes import OWN_TENSORS, PREFIX_TENSORS
from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.custom_ops.attention.limits import MAX_DECODE_QUERY_LEN
from torchpaged.custom_ops.pools import FP8
from torchpaged.testing.batches import Batch
from torchpaged.testing.oracle import assert_within_budget, run_paged_attention

_REFERENCE = BACKEND_OPS["reference"]
_FAILURES = 3  # of one configuration; then it is given up
#: Times the same-dtype reference's error. In float32 nothing is rounded to a narrower dtype that would hide
#: in which order sums are made: a kernel adds a head's products one after the other, whose error grows with
#: their number n as u * n / sqrt(2) times a product, cuBLAS's in at least 8 independent sums, whose error is
#: smaller by sqrt(8) = 2.8. 2 * sqrt(8), rounded up; a relative error of 1e-4 is over it by far.
_FLOAT32_FACTOR = 6.0
Beat = Callable[..., None]


def run_case(
    case: Mapping[str, Any], beat: Beat, ops: Mapping[str, BackendOps] = BACKEND_OPS
) -> dict[str, Any]:
    """Run ``case["batches"]`` batches of configuration ``case["seed"]`` on ``case["device"]``.

    Args:
        case: with "backends", "captures", "small" and perhaps "aim" as `random_configuration` takes them.
        beat: told before each phase, with the configuration and the batch's index.
        ops: where backends are looked up.

    Returns:
        batches, failures (index and message), kernel, captured, seconds launching (with compiling), running
        and in all, and launches whose host part took more than 0.1 s ("compiles").
    """
    begin, device = time.monotonic(), torch.device(case["device"])
    configuration = random_configuration(
        case["seed"],
        backends=tuple(case["backends"]),
        captures=case["captures"],
        small=case["small"],
        aim=case.get("aim", ""),
    )
    beat("preparing", configuration=configuration.describe(), batch=0)
    runner = _Runner(configuration, ops[configuration.backend], device, beat)
    failures: list[dict[str, Any]] = []
    done = 0
    for index in range(case["batches"]):
        beat("preparing", batch=index)
        batch = random_batch(configuration, index, device)
        try:
            _check_batch(runner, batch, index, beat)
        except AssertionError as error:
            failures.append({"batch": index, "message": f"{error}; {batch.spec}"})
        done += 1
        if len(failures) == _FAILURES:
            break
    return {
        "batches": done,
        "failures": failures,
        "kernel": runner.kernel,
        "captured": configuration.captured,
        "launching_seconds": round(runner.launching, 3),
        "running_seconds": round(runner.running, 3),
        "seconds": round(time.monotonic() - begin, 3),
        "compiles": runner.compiles,
    }


def _check_batch(runner: _Runner, batch: Batch, index: int, beat: Beat) -> None:
    before = [memory_of(t).clone() for t in (batch.q, batch.k_cache, batch.v_cache)]
    out, lse = runner.run(batch)
    again, lse_again = runner.run(batch)
    beat("checking", batch=index)
    assert _same(out, again), "two runs differ"
    assert lse is None or _same(lse, lse_again), "two runs differ"
    for name, was, now in zip(
        ("q", "k_cache", "v_cache"), before, (batch.q, batch.k_cache, batch.v_cache), strict=True
    ):
        assert _same(was, memory_of(now)), f"{name} was written to"
    exact_out, exact_lse = _expected(batch, runner.options, torch.float64)
    same_out, same_lse = _expected(batch, runner.options, batch.q.dtype)
    dtype = batch.q.dtype
    factor = _FLOAT32_FACTOR if dtype == torch.float32 else 2.0
    assert_within_budget("out", out, same_out, exact_out, dtype, factor)
    if lse is not None:
        assert_within_budget(
            "lse", lse, same_lse, exact_lse, dtype if dtype == torch.float32 else torch.float16, factor
        )
    if index % 4 == 1:
        _check_one_request_alone(runner, batch, out, index)


def _check_one_request_alone(runner: _Runner, batch: Batch, out: Tensor, index: int) -> None:
    """With NaN in every block but its own, a request's output stays the same bit for bit."""
    starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    rows = [row for row, length in enumerate(lengths) if length > 0 and starts[row + 1] > starts[row]]
    if not rows:
        return
    row = rows[index % len(rows)]
    own = batch.block_table[row, : -(-lengths[row] // batch.k_cache.shape[1])].long()
    pools = {name: clone_storage(getattr(batch, name)) for name in ("k_cache", "v_cache")}
    for name, pool in pools.items():
        nan = torch.full((), float("nan"), device=pool.device).to(pool.dtype).view(_BITS[pool.itemsize])
        memory_of(pool).view(_BITS[pool.itemsize]).fill_(nan.item())
        pool.view(_BITS[pool.itemsize])[own] = getattr(batch, name).view(_BITS[pool.itemsize])[own]
    alone, _ = runner.run(replace(batch, k_cache=pools["k_cache"], v_cache=pools["v_cache"]))
    tokens = slice(starts[row], starts[row + 1])
    assert _same(out[tokens], alone[tokens]), f"request {row} reads blocks of others"


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _same(a: Tensor, b: Tensor | None) -> bool:
    """Bitwise, NaN and the sign of zero included."""
    bits = _BITS[a.itemsize]
    return b is not None and torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def _expected(batch: Batch, options: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The reference in ``dtype``, on the batch's own device. Pools of fp8 are the same for all dtypes."""
    extras = {
        name: x.to(dtype) if name == "sinks" and dtype == torch.float64 else x
        for name, x in batch.extras.items()
    }
    for name in ("semaphore", *PREFIX_TENSORS, *OWN_TENSORS):
        extras.pop(name, None)
    pools = (batch.k_cache, batch.v_cache)
    k_cache, v_cache = pools if batch.k_cache.dtype in FP8 else (pool.to(dtype) for pool in pools)
    return run_paged_attention(
        _REFERENCE,
        replace(batch, q=batch.q.to(dtype), k_cache=k_cache, v_cache=v_cache, extras=extras),
        **options,
    )


class _Runner:
    """Runs batches of one configuration, and checks what holds for every run: gaps stay untouched, the
    semaphore returns to zero."""

    def __init__(
        self, configuration: Configuration, ops: BackendOps, device: torch.device, beat: Beat
    ) -> None:
        self.configuration, self.options, self.kernel = configuration, configuration.options, ""
        self.launching = self.running = 0.0
        self.compiles = 0
        self._ops, self._device, self._beat = ops, device, beat
        self._replayed: Callable[[], None] = lambda: None
        self._static: tuple[Batch, Tensor, Tensor | None] | None = None

    def run(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Output and LSE of a batch, as copies without gaps."""
        if not self.configuration.captured:
            out, lse = self._outputs(batch)
            self._launch(batch, out, lse)
        else:
            batch, out, lse = self._replay(batch)
        self.kernel = self.kernel or _kernel(self.configuration, batch, out)
        semaphore = batch.extras.get("semaphore")
        assert semaphore is None or not bool(semaphore.any()), "the semaphore is not zero again"
        assert bool(_gaps(out).all()), "out's gaps were written to"
        return out.contiguous(), None if lse is None else lse.clone()

    def _outputs(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        c, tokens = self.configuration, batch.q.shape[0]
        token, head, offset = c.out_padding
        strides = (c.num_heads * (c.head_dim_v + head) + token, c.head_dim_v + head, 1)
        out = strided((tokens, c.num_heads, c.head_dim_v), strides, batch.q.dtype, offset, self._device)
        return out, torch.full((tokens, c.num_heads), float("nan"), device=self._device) if c.lse else None

    def _call(self, batch: Batch, out: Tensor, lse: Tensor | None) -> None:
        extras = dict(batch.extras)
        requests: tuple[Tensor, ...] = batch.block_table, batch.seq_lens
        op, prefixes = self._ops.paged_attention, ()
        if self.configuration.groups:
            op = self._ops.cascade_attention
            requests, prefixes = (
                tuple(extras.pop(name) for name in names) for names in (OWN_TENSORS, PREFIX_TENSORS)
            )
        op(
            batch.q,
            batch.k_cache,
            batch.v_cache,
            *requests,
            batch.query_start_loc,
            *prefixes,
            out,
            lse,
            max_query_len=batch.max_query_len,
            scale=batch.scale,
            **extras,
            **self.options,
        )

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """A launch: the host's part, in which kernels may be compiled, then the device's."""
        begin = time.monotonic()
        self._beat("launching")
        yield
        launched = time.monotonic()
        self._beat("running")
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self.launching += launched - begin
        self.compiles += launched - begin > 0.1
        self.running += time.monotonic() - launched

    def _launch(self, batch: Batch, out: Tensor, lse: Tensor | None) -> None:
        with self._timed():
            self._call(batch, out, lse)

    def _capture(self, batch: Batch, out: Tensor, lse: Tensor | None) -> Callable[[], None]:
        """A call into a CUDA graph; on a CPU a replay is the call itself, so that what is copied around it
        can be tested there."""
        if self._device.type != "cuda":
            return lambda: self._call(batch, out, lse)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._call(batch, out, lse)
        return graph.replay

    def _replay(self, batch: Batch) -> tuple[Batch, Tensor, Tensor | None]:
        """Copy a batch to where the captured one was and replay; the first is captured, after a launch
        that compiles."""
        if self._static is None:
            self._static = (moved(batch, self._device), *self._outputs(batch))
            self._launch(*self._static)
            with self._timed():
                self._replayed = self._capture(*self._static)
        static, out, lse = self._static
        for name, tensor in vars(static).items():
            if isinstance(tensor, Tensor):
                memory_of(tensor).copy_(memory_of(getattr(batch, name)))
        for name, tensor in static.extras.items():
            tensor.copy_(batch.extras[name])
        for output in (out, lse):
            if output is not None:
                memory_of(output).fill_(float("nan"))
        with self._timed():
            self._replayed()
        return static, out, lse


def _gaps(out: Tensor) -> Tensor:
    """Whether what lies between the rows of ``out`` is still NaN, bool of any shape."""
    memory = memory_of(out)
    gap = torch.ones(memory.shape, dtype=torch.bool, device=out.device)
    gap.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(False)
    return memory[gap].isnan()


def _kernel(c: Configuration, batch: Batch, out: Tensor) -> str:
    """Which kernels a GPU backend launches for these shapes; the backend's name for others."""
    if batch.q.device.type != "cuda":
        return c.backend
    from torchpaged.custom_ops.attention.triton import config

    if c.groups:
        if c.backend == "triton":
            return "triton cascade"
        from torchpaged.custom_ops.attention.call import AttentionCall
        from torchpaged.custom_ops.attention.cascade_call import CascadeCall
        from torchpaged.custom_ops.attention.cuda.cascade_attention import refuse

        x = batch.extras
        tensors = (batch.q, batch.k_cache, batch.v_cache, *(x[name] for name in OWN_TENSORS))
        own = AttentionCall.of(
            *tensors,
            batch.query_start_loc,
            out,
            max_query_len=c.max_query_len,
            scale=batch.scale,
            sinks=x.get("sinks"),
        )
        refused = refuse(CascadeCall(own, *(x[name] for name in PREFIX_TENSORS)))
        return "cuda cascade" if refused is None else "cuda cascade in two calls"
    if c.backend == "cuda":
        from torchpaged.custom_ops.attention.call import AttentionCall, Specialisation
        from torchpaged.custom_ops.attention.cuda.paged_attention import route

        lengths = (batch.block_table, batch.seq_lens, batch.query_start_loc)
        options = {"max_query_len": c.max_query_len, "scale": batch.scale, **batch.extras, **c.options}
        call = AttentionCall.of(batch.q, batch.k_cache, batch.v_cache, *lengths, out, **options)
        taken = route(call, Specialisation.of(call))
        if taken.kernel != "triton":
            return f"cuda {taken.kernel}"
    group = c.num_heads // c.num_kv_heads
    if c.max_query_len <= MAX_DECODE_QUERY_LEN and c.max_query_len * group <= config.MAX_DECODE_ROWS:
        return "triton decode"
    mixed = config.decode_len_in_mixed(group, c.num_reqs, batch.q.shape[0], c.max_query_len)
    return "triton prefill and decode" if mixed else "triton prefill"
