"""Generator: requests in, tokens out, continuously batched.

    generator = Generator(model, tokenizer, max_batch_size=8)
    first = generator.submit("Once upon a time")
    for event in generator.stream():
        print(event.text, end="")

With graphs, each step starts a launch of whole decode steps for all running requests (`DecodeLoop`), or,
while prompts wait, one pass over a token of each of them and a chunk of the prompts; then it reads the tokens
of the step before. Without, it computes the same passes, samples and reads, one step at a time. Tokens are
the same.

Several threads may use one Generator: one lock lets one call in at a time, and every step moves the requests
of all of them. Each call gets the events of its own requests; one that breaks off, by an error, Ctrl-C or a
``break``, cancels its own and leaves the others running. With `Generator.start` a thread of its own makes the
steps; `Generator.close` ends it all.
"""

from typing import TYPE_CHECKING, Any

import torch

from torchpaged.cache import BlockPool, PrefixCache
from torchpaged.custom_ops.words import counted, one_line
from torchpaged.engine.calls import Calls
from torchpaged.engine.chunk_budget import ChunkBudget
from torchpaged.engine.decisions import decide
from torchpaged.engine.decode_loop import DecodeLoop, decode_rows
from torchpaged.engine.kept_prefixes import KeptPrefixes, make_prefix_cache
from torchpaged.engine.lifecycle import Lifecycle
from torchpaged.engine.model import PagedModelProtocol
from torchpaged.engine.model_watch import ModelWatch
from torchpaged.engine.options import GeneratorOptions, taking
from torchpaged.engine.outputs import GeneratorStats
from torchpaged.engine.paged import paged_model, tokens_per_request
from torchpaged.engine.request_calls import RequestCalls
from torchpaged.engine.scheduler import Scheduler
from torchpaged.engine.start import LateCompiles, StartClock, StartReport, start
from torchpaged.engine.step_graphs import PrefillGraphs, make_step_graphs
from torchpaged.engine.stepper import Stepper
from torchpaged.model_state import undone_if_it_raises
from torchpaged.prefixes.automatic import find_prefixes

if TYPE_CHECKING:
    from torchpaged.fuse import FusionReport


class Generator(KeptPrefixes, RequestCalls, Lifecycle):
    """Continuous batching over one model.

    Args:
        model: a HuggingFace causal LM, or anything like `PagedModelProtocol`.
        tokenizer: for string prompts, text and stop strings; None works with token ids.
        max_batch_size: requests that run at once; more wait.
        max_seq_len: tokens of prompt and output per request; default: the model's, at most 2048. With keys
            that are rotated by the longest text of a batch from some length on (longrope, dynamic NTK), at
            most that length.
        block_size: tokens per block; default 16. This, the next two and ``backend`` shape the cache of a
            transformers model; with a model that is paged already they are refused.
        num_blocks: blocks of the pool; default: enough for ``max_batch_size`` requests of ``max_seq_len``.
        kv_cache_memory: bytes for the pool instead.
        backend: attention backend, a route, or None / "auto".
        kv_dtype: of the pool: None, the keys' dtype; or "fp8_e4m3" or "fp8_e5m2" for half the memory.
            Refused, as the next, with a model that is paged already.
        kv_scales: of a pool in fp8: "head", one per kv head (the default), or "tensor", one per layer, both
            found in the first prompt by a forward of its own (``generator.model.kv_scales`` has them); or
            those of another engine: for each layer ``(k_scale, v_scale)``, numbers or float32 ``[1]`` or
            ``[num_kv_heads]``.
        rolling: layers with a sliding window or attention chunks keep the blocks of their window and of
            ``prefill_chunk_size`` more tokens, at most 512, used over and over, however long a request is;
            where that takes fewer, and not over backends that plan on the host. Of a prefix, what those
            layers saw is gone then but for copies (``num_checkpoints``). False: every token is kept; "auto":
            they roll, unless ``share_prefixes`` or ``prefix_cache`` is True.
        prefill_chunk_size: tokens of a step that computes prompts. Decodes of the same pass
            (``mixed_steps``) count, but leave the prompts half of it at least. More tokens cost less each as
            long as weights are read or kernels launched for longer than products take, and decoding
            requests wait longer for their next token. Layers that roll take 512 of a request. Where nothing
            decodes, and the oldest prompt has more left or its request asks for one token alone, a step has
            up to as many as the largest of ``prefill_buckets``.
        mixed_steps: while prompts wait, decoding requests get their next token in the pass that computes a
            chunk of the prompts, so that the weights are read once for both. False: the chunk has a pass of
            its own, and decodes follow; "auto": one pass, unless ``batch_invariant``, a backend that plans on
            the host with graphs, or a session too small rules it out; `mixed_reason` says what was decided.
        max_decode_wait: seconds that a step with prompts shall take at most while requests decode. Chunks
            grow from 64 tokens to what would take as long by the steps seen so far; a step whose texts are
            longer, or that compiles a kernel, may be late, and 64 tokens are computed however long they
            take. Chunks follow the clock then, so that logits' last bits may differ from run to run. None:
            not bounded.
        fuse: call `torchpaged.hf.fuse` on the model first (docs/fusion.md); for transformers models. One that
            is fused already is taken as it is; the model stays fused until the last of those that share it
            is closed, unless it is refused.
        compile: run the decode step through torch.compile, with graphs; "auto": on a GPU, unless the model is
            fully fused.
        graphs: decode through the graph runner (CUDA graphs on a GPU, the same code run eagerly on a CPU);
            "auto": if the backend can; `graph_reason` says what was decided.
        buckets: batch sizes to capture, the largest of them ``max_batch_size``, with graphs; None:
            `torchpaged.graphs.buckets.default_buckets`, on a CPU every size (no padding).
        steps_per_launch: decode steps in one graph, with graphs; at most ``max_seq_len``. More cost the host
            less per token; a request's tokens come in groups, and one that ends inside a group leaves its
            row idle until the next.
        prefill_buckets: numbers of tokens, of prompts and decodes together, for which steps that compute
            prompts are captured as well; none above four times ``prefill_chunk_size``, or once with
            ``batch_invariant``. A step of more tokens is launched from Python. None or []: all are; "auto":
            on a GPU with graphs, up to that, at most 8192 tokens
            (`torchpaged.graphs.buckets.default_prefill_buckets`), unless the model's prefill can't be
            captured or the backend's graphs are for decodes only; `prefill_graph_reason` says what was
            decided.
        capture_ahead: capture every bucket now; False: each on first need, in the middle of serving; "auto":
            now on a GPU.
        warm_up: run every kind of step that has no graph once, on padding, before the first request, so that
            nothing is compiled in the middle of serving; all kernels are compiled side by side. True: an
            error of one of these steps is raised; False: kernels are compiled when they are needed; "auto":
            on a GPU unless ``capture_ahead`` is False, and an error of one of these steps is logged.
        lookahead: tokens ahead of need that a decoding request gets blocks for while the pool is mostly free;
            default: 32 on a GPU, none on a CPU.
        capture: how steps become graphs, as in `torchpaged.graphs.DecodeGraphRunner`.
        share_prefixes: requests that run at the same time and begin with the same tokens share the full
            blocks of these, which the first of them computes. False: each computes and keeps its own; "auto":
            they share, unless ``batch_invariant``.
        prefix_cache: such blocks, and those of outputs, stay when a request has ended, for those to come that
            begin with the same tokens, until the pool needs them; those left longest ago go first
            (`torchpaged.cache.PrefixCache`). False: they go with the last request that has them; "auto": they
            stay where requests share; `prefix_cache_reason` says what was decided. They are forgotten when a
            step breaks off, when another Generator over the same PagedModel has run, and when a weight, a
            module or an adapter of the model is seen to have changed; after other changes call
            `reset_prefix_cache`.
        eviction: which of these blocks goes first instead: an `torchpaged.cache.EvictionPolicy` of this
            Generator alone. What `pin` has pinned goes last, whatever it says.
        num_checkpoints: in a model whose layers keep states or rings (``rolling``), copies of a request's
            that are kept for those that begin alike: where one is, a hit ends
            (`torchpaged.cache.checkpoints`). Each takes ``model.rings.bytes_per_request``. Default:
            ``max_batch_size``, at most 64, an eighth of ``kv_cache_memory``, and no more rings than take the
            memory of every token; none where requests do not share. 0: they share nothing there.
        host_cache_memory: bytes of host memory, pinned on a GPU, for copies of the blocks that the pool gives
            up: a request that finds them there waits for their way back instead of computing them, where that
            is faster by the rates measured so far. Not where layers keep states or rings. None: what the pool
            gives up is lost.
        disk_cache_path, disk_cache_size: a folder, and bytes in it at most, for those of these copies that
            were used longest ago: they go to a file and come back through ``host_cache_memory``, where that
            is faster by the rates measured so far; without it through host memory for four of the longest
            texts, at most 1 GiB. Threads write and read. The file has no name and ends with this process. A
            block that does not come back as it was written is computed again, and counted (`metrics`).
        preemption: what happens to keys and values of a request that is put back, since blocks are short.
            They are there until the pool needs the blocks; then "swap" copies these to the host
            (``host_cache_memory``), from where they always come back, and "recompute" gives them up. "auto":
            to the host, if there and back is faster than to compute them by the rates measured so far;
            ``stats.swapped`` counts such requests. What went on to a disk comes back where that is faster,
            whatever is said here. Tokens are the same.
        checkpoint_every: tokens of a prompt between two of them, about; a multiple of ``block_size``. Fewer
            than the default, ``prefill_chunk_size`` or ``max_seq_len`` if that is less, cut chunks short.
        cascade: decode steps read blocks that several requests share once, where that pays
            (`torchpaged.prefixes`): with graphs by a second graph of each bucket in which that can pay, which
            ``capture_ahead`` captures, too. True: by the device's own costs;
            `torchpaged.prefixes.CascadeCosts`: by these; False: never. `cascade_reason` says what was
            decided.
        batch_invariant: every step of a request has the same shapes in every batch, and attention
            gives it the same bits, by a backend that declares it: decode steps are all of ``max_batch_size``
            rows, a step prefills one request, none shares blocks or is put back. The other ops are torch's,
            which gives a row of a matrix product the same bits at any place among as many rows on the
            devices seen, but promises it nowhere. A step that broke off makes its requests begin again.
        logits_processor: ``logits_processor(logits, rows)`` gives the logits to sample from, in front of
            repetition penalty and temperature. ``logits``: a copy of the model's, ``[B, vocab_size]``
            float32, which may be written; ``rows``: a `LogitsRows`. The result has the same shape, dtype and
            device. It runs over all rows of a step, those without a request included. Decode steps in graphs
            call it at their capture alone, so that it consists of torch's ops, and the host reads no value of
            the device; tensors of its own stay where they are, and may be written in place between steps.
        max_extra_args: numbers that a request may give ``logits_processor``, by
            ``SamplingParams(extra_args=...)``.
        max_logit_bias: tokens of a request that ``SamplingParams(logit_bias=...)`` may be for; with
            ``min_new_tokens`` each of its end tokens is one of them. 0: requests with either are refused.
            They cost a float32 copy of the logits per step.
        max_logprobs: likeliest tokens whose log probabilities a request may ask for by
            ``SamplingParams(logprobs=...)``; None: requests that ask for any are refused. They are computed
            in every launch then, for all rows.
        progress: called with ``(done, total, text)`` while kernels are compiled, buckets are captured and
            steps are warmed up; each counts anew.

    Attributes:
        choice: which backend runs and why.
        loop: the decode loop over the device's rows; None without graphs.
        graph_reason, compile_reason: why there are graphs or not, and whether decode steps are compiled.
        mixed_reason: whether decodes and chunks of prompts run in one pass, and why.
        cascade_reason: whether shared prefixes may be read once, and why.
        prefix_cache_reason: whether blocks are kept for requests to come, and why.
        prefix_cache: the `torchpaged.cache.PrefixCache` by which requests share; None: they do not.
        fusion_report: what `torchpaged.hf.fuse` did to the model; None if it is not fused.
        start_report: what the start took, and whether it was warmed up: a `StartReport`.
        stats: counters.

    Raises:
        ArgumentError, BackendUnavailableError, UnsupportedModelError: what was asked can't be had; nothing
            stays allocated then.
        ArgumentError: of `submit` and `generate`, with graphs: the model's modules, weights or adapters are
            others than those that the graphs were made with. Of several `submit` between two steps the first
            looks; what changes behind it, the next step raises. Steps that run the model's Python look
            at all of it but weights' addresses, replays at adapters.
        CaptureError: a bucket could not be captured ahead; names the bucket and the op.
        NotCopyableError: it is copied or pickled: its graphs and rows are places in this process's memory.
    """

    _ADVICE = "copy or pickle the model, and make a Generator of it where you need one"

    @undone_if_it_raises
    @taking(GeneratorOptions)
    def __init__(self, model: Any, options: GeneratorOptions) -> None:
        clock = StartClock()
        self.max_seq_len, self._longest_text = tokens_per_request(model, options.max_seq_len)
        self.model: PagedModelProtocol
        self.model, self._give_back = paged_model(model, options, self.max_seq_len)
        self.tokenizer = options.tokenizer
        self.choice, self.device = self.model.choice, torch.device(self.model.device)
        self.fusion_report: FusionReport | None = getattr(self.model, "fusion_report", None)
        self._decided = decided = decide(options, self.model, self.max_seq_len)
        self.graph_reason, self.compile_reason = decided.graph_reason, decided.compile_reason
        self.mixed_reason, self.prefix_cache_reason = decided.mixed_reason, decided.keep_reason
        watch = ModelWatch(getattr(self.model, "model", self.model), decided.graphs, decided.shares)
        cache = self.model.kv_cache
        columns = -(-self.max_seq_len // cache.block_size)
        sizes = {"max_blocks_per_req": columns, "block_size": cache.block_size}
        rings = getattr(self.model, "rings", None)
        first_shared = decided.shares and rings is None  # by which requests that share are known
        prefixes, self.cascade_reason = find_prefixes(
            self.model.session, options.cascade, first_shared, **sizes
        )
        self.pool = BlockPool(cache.num_blocks)
        self.prefix_cache: PrefixCache | None = make_prefix_cache(
            self.pool, options, decided, cache, self.max_seq_len, rings
        )
        self._rows = decode_rows(
            self.model, options.max_batch_size, columns, options.steps_per_launch, options.logits_stage
        )
        self.loop: DecodeLoop | None = None
        self._prefill_graphs: PrefillGraphs | None = None
        if decided.graphs:
            self.loop, self._prefill_graphs = make_step_graphs(
                self.model, self._rows, options, decided, prefixes
            )
        graphs = self.loop, self._prefill_graphs
        self.start_report: StartReport = start(self.model, self._rows, options, decided, *graphs, clock)
        wait = options.max_decode_wait
        self.scheduler = Scheduler(
            self.pool,
            cache.block_size,
            options.max_batch_size,
            options.prefill_chunk_size,
            options.steps_per_launch if decided.graphs else 0,
            decided.lookahead,
            prefixes=self.prefix_cache,
            one_prompt_per_step=options.batch_invariant,
            mixes=decided.mixes,
            buckets=() if self._prefill_graphs is None else self._prefill_graphs.buckets,
            max_query_len=None if rings is None or rings.blocks is None else rings.blocks.step,
            budget=None if wait is None else ChunkBudget(wait, options.prefill_chunk_size),
            rings=rings,
            preemption=options.preemption,
            steps=None if self.loop is None else self.loop.step_count,
        )
        self._stepper = Stepper(
            self.model,
            self.scheduler,
            self.loop,
            watch,
            self._rows,
            self._prefill_graphs,
            prefixes,
            decided.mixes,
        )
        self._requests, self._next_id = self._stepper.requests, 0
        self.stats: GeneratorStats = self._stepper.stats
        self._stepper.late = LateCompiles(self.stats, warns=self.start_report.warmed_up)
        self._calls = Calls(self._stepper, disk=options.disk_cache_path is not None)

    def _free(self) -> None:
        try:
            if self.loop is not None:
                self.loop.reset()  # nothing of it runs on the device any more
        finally:
            if self.prefix_cache is not None and self.prefix_cache.host is not None:
                self.prefix_cache.host.close()
            self.loop = self._prefill_graphs = self.prefix_cache = None
            del self.model, self.scheduler, self._stepper, self._rows
            self._give_back()

    def __repr__(self) -> str:
        if self._calls.closed:
            return f"{type(self).__name__}(closed)"
        model = type(getattr(self.model, "model", self.model)).__name__
        return one_line(
            self,
            model,
            f"backend={self.choice.name!r}",
            counted(len(self._requests), "request"),
            f"{self.pool.num_free} of {counted(self.pool.num_usable, 'block')} free",
            f"max_batch_size={self.scheduler.max_batch_size}",
        )
