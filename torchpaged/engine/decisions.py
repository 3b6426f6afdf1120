"""What the options of a Generator come to with its model: whether steps are captured and compiled, and
whether requests share blocks. Each decision comes with its reason, which the Generator's attributes say.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchpaged.backends import Choice, GraphSupport
from torchpaged.custom_ops.errors import ArgumentError, BackendUnavailableError
from torchpaged.custom_ops.words import counted, of_bytes
from torchpaged.engine.model import PagedModelProtocol
from torchpaged.engine.numbers import shown
from torchpaged.engine.options import GeneratorOptions
from torchpaged.graphs.buckets import default_prefill_buckets

if TYPE_CHECKING:
    from torchpaged.fuse import FusionReport

#: Tokens, two blocks: with 128 a scheduler's step takes 20 us less at 256 rows, but 14 % of the places in
#: blocks in use hold no token, 4 % with 32 (`benchmarks/bench_blocks.py`).
LOOKAHEAD = 32


class Decisions(NamedTuple):
    """What an engine does.

    Attributes:
        graphs, graph_reason: whether decode steps are captured, and why.
        compile, compile_reason: whether they are compiled.
        buckets: batch sizes to capture; None: the default ones.
        prefill_buckets, prefill_reason: numbers of tokens for which prefills are captured, none = no such
            graphs.
        ahead: whether all is captured at once.
        warm_up, warm_up_reason: whether all else that steps need is compiled at once, too.
        shares: whether requests share blocks.
        keeps, keep_reason: whether blocks are kept for requests to come, and why.
        lookahead: tokens ahead of need that decoding requests get blocks for.
        mixes, mixed_reason: whether decodes and chunks of prompts run in one pass, and why.
    """

    graphs: bool
    graph_reason: str
    compile: bool
    compile_reason: str
    buckets: Sequence[int] | None
    prefill_buckets: list[int]
    prefill_reason: str
    ahead: bool
    warm_up: bool
    warm_up_reason: str
    shares: bool
    keeps: bool
    keep_reason: str
    lookahead: int
    mixes: bool
    mixed_reason: str


def decide(options: GeneratorOptions, model: PagedModelProtocol, max_seq_len: int) -> Decisions:
    """All of it, for a model that is paged.

    Raises:
        ArgumentError, BackendUnavailableError: an option asks for what can't be had.
    """
    on_gpu = torch.device(model.device).type == "cuda"
    graphs, reason = decide_graphs(options.graphs, model.choice, on_gpu)
    fusion: FusionReport | None = getattr(model, "fusion_report", None)
    compile, compile_reason = decide_compile(options.compile, on_gpu, graphs, reason, fusion)
    if not graphs:
        _require_no_graphs(options, reason)
    if options.steps_per_launch != 1 and model.session.plans_every_decode:
        raise ArgumentError(
            "steps_per_launch",
            f"1 with backend {model.choice.name!r}, which plans every step on the host",
            str(options.steps_per_launch),
        )
    if options.steps_per_launch > max_seq_len:
        raise ArgumentError(
            "steps_per_launch",
            f"at most max_seq_len, {max_seq_len}: no request has more tokens",
            str(options.steps_per_launch),
        )
    if options.max_logprobs is not None and options.max_logprobs > model.vocab_size:
        expected = f"None, or at most the {model.vocab_size} tokens of the vocabulary"
        raise ArgumentError("max_logprobs", expected, str(options.max_logprobs))
    support = model.choice.backend.capabilities.graph_support
    limit = model.session.limits.max_num_tokens
    most = options.prefill_chunk_size, min(options.prompt_tokens, limit or options.prompt_tokens)
    prefills, why = decide_prefill_buckets(options.prefill_buckets, most, on_gpu, graphs, reason, support)
    buckets = options.buckets
    if options.batch_invariant:
        _require_invariant(options, model, max_seq_len, None if graphs else reason)
        buckets = [options.max_batch_size]
    elif buckets is None and not on_gpu:
        buckets = range(1, options.max_batch_size + 1)
    ahead = on_gpu if options.capture_ahead == "auto" else options.capture_ahead is True
    warm = decide_warm_up(options.warm_up, on_gpu, ahead)
    shares, keeps, keep_reason = decide_sharing(options, _own_of_requests(model))
    if options.eviction is not None and not keeps:
        raise ArgumentError("eviction", "None where nothing is kept", shown(options.eviction), keep_reason)
    for name in ("host_cache_memory", "disk_cache_path"):
        if getattr(options, name) is not None and (not keeps or getattr(model, "rings", None) is not None):
            why = "states of requests have no copies on the host" if keeps else keep_reason
            raise ArgumentError(name, "None here", shown(getattr(options, name)), why)
    if keeps:
        keep_reason += _copies_of_states(model)
    lookahead = options.lookahead
    if lookahead is None:
        lookahead = LOOKAHEAD if on_gpu and graphs else 0
    mixed = decide_mixed(options, model, graphs)
    compiled = compile, compile_reason
    kept = keeps, keep_reason
    return Decisions(
        graphs, reason, *compiled, buckets, prefills, why, ahead, *warm, shares, *kept, lookahead, *mixed
    )


def decide_graphs(graphs: bool | str, choice: Choice, on_gpu: bool) -> tuple[bool, str]:
    """Whether decode goes through the runner, and why."""
    if graphs is False:
        return False, "switched off by graphs=False"
    if not on_gpu:
        return True, "eager capture on a CPU"
    support = choice.backend.capabilities.graph_support
    reason = f"backend {choice.name!r} declares graph support {support.name}"
    if support == GraphSupport.NEVER and graphs is True:
        raise BackendUnavailableError(f"graphs=True: {reason}; choose another backend or graphs='auto'")
    return support != GraphSupport.NEVER, reason


def _require_no_graphs(options: GeneratorOptions, reason: str) -> None:
    """Refuse what only graphs could do; ``reason``: why there are none."""
    capture: Any = options.capture
    for name, is_off, off in (
        ("steps_per_launch", options.steps_per_launch == 1, "1"),
        ("buckets", options.buckets is None, "None"),
        ("capture", isinstance(capture, str), "'auto'"),
        ("capture_ahead", options.capture_ahead is not True, "'auto' or False"),
    ):
        if not is_off:
            raise ArgumentError(
                name, f"{off} without graphs", shown(getattr(options, name)), f"graphs: {reason}"
            )


def decide_prefill_buckets(
    prefill_buckets: Sequence[int] | str | None,
    most: tuple[int, int],
    on_gpu: bool,
    use_graphs: bool,
    graph_reason: str,
    support: GraphSupport = GraphSupport.ALWAYS,
) -> tuple[list[int], str]:
    """Numbers of tokens for which prefills are captured, none = no such graphs, and why.

    ``most``: tokens of a step beside decodes, and where nothing decodes. ``support``: the backend's. On a GPU
    anything below ALWAYS rules prefills out: their query lengths differ from replay to replay.
    """
    without, why_not = "", ""
    if not use_graphs:
        without, why_not = "without graphs", f"graphs: {graph_reason}"
    elif on_gpu and support < GraphSupport.ALWAYS:
        without = "with this backend"
        why_not = f"the backend declares graph support {support.name}, prefills need ALWAYS"
    if prefill_buckets == "auto":
        if why_not:
            return [], f"automatic: {why_not}"
        if not on_gpu:
            return [], "automatic: on a CPU a step does not wait for launches"
        sizes = sorted({size for tokens in most for size in default_prefill_buckets(tokens)})
        return sizes, "automatic: on a GPU with graphs"
    if not prefill_buckets:
        return [], f"switched off by prefill_buckets={prefill_buckets}"
    if why_not:
        raise ArgumentError(
            "prefill_buckets", f"None or 'auto' {without}", str(list(prefill_buckets)), why_not
        )
    sizes = sorted({int(size) for size in prefill_buckets})
    return sizes, f"prefill_buckets={sizes} was given"


def decide_compile(
    compile: bool | str, on_gpu: bool, use_graphs: bool, graph_reason: str, fusion: "FusionReport | None"
) -> tuple[bool, str]:
    """Whether the decode step goes through torch.compile, and why."""
    if not use_graphs:
        if compile is True:
            raise ArgumentError(
                "compile", "False or 'auto' without graphs", "True", f"graphs: {graph_reason}"
            )
        return False, "steps without graphs run eagerly"
    if compile != "auto":
        return compile is True, f"compile={compile} was given"
    if not on_gpu:
        return False, "automatic: eager on a CPU"
    if fusion is not None and fusion.complete:
        return False, "automatic: the model is fully fused, which leaves nothing to compile"
    parts = "" if fusion is None else ", and fuse() left parts of the model alone"
    return True, f"automatic: on a GPU{parts}"


def decide_warm_up(warm_up: bool | str, on_gpu: bool, ahead: bool) -> tuple[bool, str]:
    """Whether the start runs every kind of step once, and why; ``ahead``: graphs are captured at once."""
    if warm_up != "auto":
        return warm_up is True, f"warm_up={warm_up} was given"
    if not on_gpu:
        return False, "automatic: on a CPU next to nothing is compiled"
    return ahead, "automatic: on a GPU" if ahead else "automatic: capture_ahead=False puts off what it can"


def _own_of_requests(model: PagedModelProtocol) -> str:
    """What a request keeps besides blocks, so that another could not go on from these; empty: nothing."""
    rings: Any = getattr(model, "rings", None)
    if rings is None:
        return ""
    if rings.num_checkpoints:
        return ""
    if rings.blocks is None:
        return (
            "layers keep a state per request, which is that of its last token alone, and no copies of it "
            "(num_checkpoints=0)"
        )
    return (
        "layers with a window keep rings of blocks: what they saw of a prefix is gone, and there are no "
        "copies of them (num_checkpoints=0); rolling=False"
    )


def _copies_of_states(model: PagedModelProtocol) -> str:
    """Of a reason: what is kept besides blocks; empty: nothing."""
    rings: Any = getattr(model, "rings", None)
    if rings is None or not rings.num_checkpoints:
        return ""
    size = of_bytes(rings.num_checkpoints * rings.bytes_per_request)
    return f"; with {counted(rings.num_checkpoints, 'checkpoint')} of requests' states or rings, {size}"


def decide_sharing(options: GeneratorOptions, own: str) -> tuple[bool, bool, str]:
    """Whether requests share blocks, whether these are kept for those to come, and why; ``own``: what keeps
    them from it, of `_own_of_requests`.

    Raises:
        ArgumentError: they shall, and the keys of one, or its states, are gone by then.
    """
    if options.shall_share is not None and own:
        raise ArgumentError(options.shall_share, "'auto' or False with this model", "True", own)
    if options.share_prefixes is False:
        return False, False, "switched off by share_prefixes=False"
    if options.batch_invariant:
        return False, False, "batch_invariant=True: a step's shapes would depend on what is known"
    if own:
        return False, False, own
    if options.prefix_cache is False:
        return True, False, "switched off by prefix_cache=False"
    policy = options.eviction
    order = "those left longest ago" if policy is None else f"those that {type(policy).__name__} chooses"
    return True, True, f"until the pool needs the blocks, {order} first"


def decide_mixed(options: GeneratorOptions, model: PagedModelProtocol, graphs: bool) -> tuple[bool, str]:
    """Whether decodes and chunks run in one pass, and why.

    Raises:
        ArgumentError: they shall, and can't.
    """
    if options.mixed_steps is False:
        return False, "switched off by mixed_steps=False"
    most, why_not = model.session.limits.max_num_tokens, ""
    if options.batch_invariant:
        why_not = "batch_invariant=True: decode steps are of one size"
    elif graphs and model.session.plans:
        why_not = f"backend {model.choice.name!r} plans batches by lengths that the device alone knows"
    elif most is not None and most < options.step_tokens:
        why_not = f"the model's session takes {most} tokens, a step may have {options.step_tokens}"
    if why_not and options.mixed_steps is True:
        raise ArgumentError("mixed_steps", "'auto' or False", "True", why_not)
    return not why_not, f"automatic: {why_not or 'decodes and prompts read the weights once'}"


def _require_invariant(
    options: GeneratorOptions, model: PagedModelProtocol, max_seq_len: int, no_graphs: str | None
) -> None:
    """Refuse what would let a request's bits depend on the others of an engine.

    Raises:
        ArgumentError: no graphs (``no_graphs`` says why), whose decode steps are of one size; buckets of
            several; shared prefixes, which others compute; so few blocks that a request may be put back and
            computed otherwise; or scales of fp8 pools that the first prompt would give all others.
    """
    wants, most, cache = "with batch_invariant=True", options.max_batch_size, model.kv_cache
    if no_graphs is not None:
        raise ArgumentError("batch_invariant", "graphs: decode steps of one size", f"none ({no_graphs})")
    if options.buckets is not None and list(options.buckets) != [most]:
        raise ArgumentError("buckets", f"None or [{most}] {wants}", str(list(options.buckets)))
    if options.shall_share is not None:
        raise ArgumentError(options.shall_share, f"'auto' or False {wants}", "True")
    need = most * -(-max_seq_len // cache.block_size) + 1
    if cache.num_blocks < need:
        raise ArgumentError(
            "num_blocks",
            f"at least {need} {wants}: {most} requests of {max_seq_len} tokens and the null block, "
            "so that none is put back and computed again in other steps",
            str(cache.num_blocks),
        )
    if getattr(model, "needs_scales", False):
        raise ArgumentError("kv_scales", f"scales {wants}: those found are of the first prompt", "none")
