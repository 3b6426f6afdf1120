"""Stream order: what each kernel of an op reads before the kernels ahead have ended, what it writes, and when
the next one may begin.

With programmatic dependent launch (compute capability 9.0 and later) a kernel may begin before the kernels
ahead of it on the stream have ended. It reads ``reads_early`` right away and everything else behind its
``griddepcontrol.wait``, which returns when all kernels ahead have ended and their stores are visible.
``griddepcontrol.launch_dependents`` lets the kernel behind begin. One rule follows for all of them: **what is
read early is written by kernels alone that never let their dependents start**. docs/stream_order.md renders
`STREAM_ORDER` and says what the rule requires of other kernels; tests/custom_ops/test_stream_order.py
compares it with sources and PTX.

Data only: no import of torch, so that scripts load this file by its path.
"""

from typing import NamedTuple


class Launch(NamedTuple):
    """How one kernel of an op stands in the stream's order.

    Attributes:
        kernel: ``file:function``; the file's name alone, since it is unique.
        case: which calls are served; empty: all of the op's that reach this kernel.
        reads_early: what it reads before its wait. Everything else it reads behind it.
        reads_of_ahead: what it reads before its wait, too, but may be written by kernels that trigger: the
            op's kernel in front of it, in the row above, waits first and triggers behind its wait, so that
            what was ahead of both is complete.
        writes: tensors of the op that it stores to, always behind its wait; ``scratch`` where it stores to
            scratch memory alone. Beside tensors that is left out, as semaphores are everywhere.
        waits: one of `WAITS`.
        triggers: one of `TRIGGERS`: when it lets the kernel behind begin.
        fence: whether it ends with a fence to the GPU's scope, so that a kernel behind that reads early sees
            its stores.
        why: the reason, where it is not the rule itself.
    """

    kernel: str
    writes: tuple[str, ...]
    triggers: str = "never"
    reads_early: tuple[str, ...] = ()
    waits: str = "first"
    fence: bool = False
    case: str = ""
    why: str = ""
    reads_of_ahead: tuple[str, ...] = ()

    @property
    def early(self) -> bool:
        """Whether it is launched with programmatic dependent launch, so that it may begin before the kernels
        ahead have ended."""
        return self.waits != "launch"


#: ``first``: before the first store, and before the first load that is not in ``reads_early``. ``launch``: no
#: instruction; the kernel is launched the ordinary way and begins when those ahead have ended. ``last``: one
#: program, at its very end.
WAITS = ("first", "launch", "last")

#: ``start``: ahead of its wait. ``wait``: right behind its wait. ``issued``: behind its wait, once all of its
#:     copies are issued.
#: ``never``: the kernel behind begins when this one has ended.
TRIGGERS = ("start", "wait", "issued", "never")

LENGTHS = ("seq_lens", "query_start_loc")
ROWS = (*LENGTHS, "state_slots")
MIXER = ("weight", "bias", "a_log", "dt_bias")
METADATA = (*LENGTHS, "block_table")
CONTEXT = "context KV"  # keys and values at positions below seq_len - query_len
LAST_STATES = "old states"  # conv_state and state, as kernels ahead of seq_lens' writer left them
QUERY_TOKENS = "query tokens' KV"
ROW = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seeds", "counters")
INPUTS = ("input_ids", "positions", "seq_lens", "slot_mapping")
STATE = ("seq_lens", "remaining", "block_table", "stop_token_ids", "launches")
TURNED = ("positions", "slot_mapping", "cos_sin", "q_norm", "k_norm")
CONV = ("conv_state", "out")
OUT, SCRATCH, ALL = ("out", "lse"), ("scratch",), ("everything",)
RESULTS = ("counters", "remaining", "seen", "tokens_out", "ring", "launches")

#: Names for tensors that go together, where the table is rendered.
GROUPS = {
    "metadata": METADATA,
    "rows": ROWS,
    "mixer": MIXER,
    "parameters": ROW,
    "inputs": INPUTS,
    "results": RESULTS,
    "state": STATE,
    "rotation": TURNED,
    "pools": ("conv_state", "state"),
}

STREAM_ORDER: dict[str, tuple[Launch, ...]] = {
    "paged_attention": (
        Launch(
            "decode.cu:paged_decode",
            OUT,
            "wait",
            (*METADATA, CONTEXT),
            case="cuda, decode",
            why="a query token of this step is context in the next",
        ),
        Launch("prefill.cu:paged_prefill", OUT, "wait", METADATA, case="cuda, prefill on Hopper"),
        Launch(
            "prefill.cu:paged_prefill",
            OUT,
            "start",
            METADATA,
            case="cuda, prefill on Hopper, tiles in parts",
            why="the merge launch behind it waits for all of it",
        ),
        Launch("prefill_merge.cu:paged_prefill_merge", OUT, "wait", case="cuda, merge of prefill's parts"),
        Launch(
            "prefill.cu:paged_prefill",
            OUT,
            "start",
            waits="launch",
            case="cuda, a mixed batch's prefill half",
            why="the decode launch behind it reads nothing that it writes",
        ),
        Launch(
            "decode.cu:paged_decode",
            OUT,
            "start",
            ALL,
            waits="last",
            case="cuda, a mixed batch's decode half",
            why="begins when all ahead of the prefill half has ended",
        ),
        Launch(
            "prefill.cu:paged_prefill",
            OUT,
            "start",
            ALL,
            waits="last",
            case="cuda, a mixed batch's late prefill CTAs",
            why="begin when every CTA of the decode half runs; one waits for it at its end",
        ),
        Launch("decode.py:decode_kernel", OUT, "wait", case="triton, decode"),
        Launch(
            "prefill.py:prefill_kernel",
            OUT,
            "wait",
            ("query_start_loc",),
            case="triton, prefill, also a mixed batch's",
            why="the decode launch behind it relies on the order: wait, then trigger",
        ),
        Launch(
            "decode.py:decode_kernel",
            OUT,
            "start",
            ALL,
            waits="last",
            fence=True,
            case="triton, a mixed batch's decode half",
            why=(
                "begins when each program of the prefill half has waited; the fence, at its start, "
                "drops old L1 lines"
            ),
        ),
    ),
    "cascade_attention": (
        Launch(
            "prefill.cu:paged_prefill",
            SCRATCH,
            "start",
            waits="launch",
            case="cuda, prefixes",
            why="the decode launch behind it reads nothing that it writes",
        ),
        Launch(
            "decode.cu:paged_decode",
            ("out",),
            "start",
            ALL,
            waits="last",
            case="cuda, suffixes",
            why="begins when all ahead of the prefixes' launch has ended",
        ),
        Launch(
            "prefill_merge.cu:paged_prefill_merge", OUT, "wait", case="cuda, merge of prefixes and suffixes"
        ),
    ),
    "write_kv": (
        Launch("write_kv.py:write_kv_kernel", (CONTEXT,), fence=True, case="are_query_tokens=False"),
        Launch(
            "write_kv.py:write_kv_kernel",
            (QUERY_TOKENS,),
            "start",
            ("slot_mapping",),
            case="are_query_tokens=True",
            why="attention reads the query tokens' own keys behind its wait",
        ),
    ),
    "rope_write_kv": (
        Launch(
            "rope_write_kv.py:rope_write_kv_kernel",
            ("q_out", CONTEXT),
            fence=True,
            case="are_query_tokens=False",
        ),
        Launch(
            "rope_write_kv.py:rope_write_kv_kernel",
            ("q_out", QUERY_TOKENS),
            "start",
            TURNED,
            case="are_query_tokens=True",
            why="as write_kv",
        ),
    ),
    "mla_attention": (
        Launch("attend.py:mla_kernel", OUT, waits="launch", case="one part per request"),
        Launch("attend.py:mla_kernel", SCRATCH, waits="launch", case="parts of the context"),
        Launch("attend_selected.py:selected_kernel", OUT, waits="launch", case="indices, one part per token"),
        Launch("attend_selected.py:selected_kernel", SCRATCH, waits="launch", case="indices, in parts"),
        Launch("merge.py:merge_kernel", OUT, waits="launch", case="merge of the parts"),
        Launch(
            "latent.cu:latent_decode",
            OUT,
            "wait",
            (*METADATA, CONTEXT),
            case="cuda, short queries on Hopper",
            why="a query token of this step is context in the next",
        ),
        Launch("latent_pairs.cu:latent_pairs", OUT, "wait", LENGTHS, case="cuda, many rows on Hopper"),
        Launch(
            "latent_fp8.cu:latent_fp8",
            OUT,
            "wait",
            (*METADATA, CONTEXT),
            case="cuda, rows of fp8 on Hopper",
            why="a query token of this step is context in the next",
        ),
        Launch(
            "latent_merge.cu:latent_merge",
            OUT,
            "start",
            LENGTHS,
            case="cuda, merge of cut requests",
            why="begins when each CTA of the kernel in front of it has waited",
        ),
        Launch("selected.cu:attend_selected", OUT, "start", METADATA, case="cuda, indices on Hopper"),
        Launch("latent_selected.cu:latent_selected", OUT, "start", LENGTHS, case="cuda, indices, many heads"),
        Launch("selected_few.cu:attend_few", SCRATCH, "start", METADATA, case="cuda, few with indices"),
        Launch("selected_few_merge.cu:merge_few", OUT, "start", case="cuda, merge of these parts"),
    ),
    "write_latent": (
        Launch("write_kv.py:write_kv_kernel", (CONTEXT,), fence=True),
        Launch("write_latent.py:write_fp8_kernel", (CONTEXT,), fence=True, case="rows of fp8"),
    ),
    "rope_write_latent": (
        Launch(
            "rope_write_latent.py:rope_write_latent_kernel",
            ("q_out", CONTEXT),
            reads_early=("up_keys",),
            fence=True,
            case="other tokens",
        ),
        Launch(
            "rope_write_latent.py:rope_write_latent_kernel",
            ("q_out", QUERY_TOKENS),
            "start",
            ("up_keys", "slot_mapping"),
            case="query tokens",
            why="as write_kv",
        ),
    ),
    "up_project_values": (
        Launch("up_project_values.py:up_project_values_kernel", ("out",), "start", ("up_values",)),
    ),
    "causal_conv": (
        Launch("conv_token.py:conv_token_kernel", CONV, "start", ("weight", "bias", *ROWS)),
        Launch("causal_conv.py:causal_conv_kernel", CONV, "start", ROWS, case="rows of one tile"),
        Launch("causal_conv.py:causal_conv_kernel", CONV, "start", case="rows of several tiles"),
    ),
    "delta_gates": (Launch("delta_gates.py:delta_gates_kernel", ("g", "beta"), "wait"),),
    "gated_rms_norm": (Launch("gated_rms_norm.py:gated_rms_norm_kernel", ("out",), "wait"),),
    "delta_step": (
        Launch(
            "delta_step.cu:delta_step",
            ("conv_state", "state", "out"),
            "start",
            (*MIXER, "norm_weight", *ROWS),
            case="cuda, on Hopper",
        ),
        Launch(
            "delta_step.cu:delta_step",
            ("conv_state", "state", "out"),
            "start",
            (*MIXER, "norm_weight", *ROWS, LAST_STATES),
            case="a new step",
            why="what writes seq_lens stands between two steps",
        ),
    ),
    "mamba2_step": (
        Launch(
            "mamba2_step.cu:mamba2_step",
            ("conv_state", "state", "out"),
            "start",
            (*MIXER, "skip_weight", *ROWS),
            case="cuda, on Hopper",
        ),
        Launch(
            "mamba2_step.cu:mamba2_step",
            ("conv_state", "state", "out"),
            "start",
            (*MIXER, "skip_weight", *ROWS, LAST_STATES),
            case="a new step",
            why="what writes seq_lens stands between two steps",
        ),
        Launch(
            "mamba2_step.cu:mamba2_step",
            ("conv_state", "state", "out"),
            "start",
            ALL,
            waits="last",
            case="cuda, beside the attention in front of it",
            why="begins when each CTA of that one has waited for all that is ahead of both",
        ),
        Launch("mamba2_step.py:skip_and_gate_kernel", ("out",), "wait", case="its last part elsewhere"),
    ),
    "selective_scan": (),  # what it launches is linear_attention's
    "rg_lru": (),  # likewise
    "linear_attention": (
        Launch("linear_decode.py:linear_decode_kernel", ("state", "out"), waits="launch"),
        Launch("chunk_products.py:chunk_kernel", ("out",), waits="launch", case="long rows"),
        Launch("key_products.py:key_chunk_kernel", ("out",), waits="launch", case="long rows"),
        Launch("chunk_pass.py:pass_kernel", ("state", "out"), waits="launch", case="long rows"),
        Launch("chunk_pass.py:join_kernel", SCRATCH, waits="launch", case="segments of long rows"),
        Launch("delta_chunks.cu:delta_chunks", ("out",), "start", case="cuda, long rows of delta nets"),
        Launch("key_chunks.cu:key_chunks", ("out",), "start", case="cuda, long rows of Kimi's"),
        Launch("delta_pass.cu:delta_pass", ("state", "out"), "start", case="cuda, behind either of these"),
        Launch("linear_attention.py:recurrent_kernel", ("state", "out"), "wait"),
        Launch(
            "state_decode.cu:update_states", ("state", "out"), "start", case="cuda, single tokens on Hopper"
        ),
    ),
    "write_index_keys": (
        Launch("write_index_keys.py:write_index_keys_kernel", ("k_cache", "k_scale"), waits="launch"),
    ),
    "index_logits": (
        Launch("index_logits.py:index_logits_kernel", ("logits",), waits="launch"),
        Launch(
            "index_logits.cu:index_logits",
            ("logits",),
            "start",
            ("seq_lens", "query_start_loc"),
            case="cuda, few query tokens on Hopper",
        ),
    ),
    "top_k_indices": (  # other devices: kernels of torch, which are launched the ordinary way
        Launch("top_k_indices.cu:top_k_indices", ("indices",), "start", case="cuda, on Hopper"),
    ),
    "merge_attn_states": (Launch("merge_attn_states.py:merge_attn_states_kernel", OUT, waits="launch"),),
    "copy_blocks": (Launch("copy_blocks.py:copy_blocks_kernel", (CONTEXT,), waits="launch", fence=True),),
    "advance_step": (Launch("advance_step.py:advance_step_kernel", INPUTS, waits="launch"),),
    "sample_tokens": (
        Launch("sample_tokens.py:sample_tiles_kernel", SCRATCH, "start", case="tiles of the vocabulary"),
        Launch("sample_tokens.py:merge_tiles_kernel", ("out",), "start", case="merge of a row's tiles"),
    ),
    "accept_tokens": (Launch("accept_tokens.py:accept_tokens_kernel", (*INPUTS, *RESULTS)),),
    "finish_step": (
        Launch(
            "sample_tokens.py:sample_tiles_kernel",
            SCRATCH,
            "start",
            ROW,
            case="tiles of the vocabulary",
            why="reads all of a row but its logits and seen bits",
        ),
        Launch(
            "finish_step.py:finish_step_kernel",
            (*INPUTS, *RESULTS),
            reads_early=(*ROW, *STATE),
            case="end of the step",
        ),
    ),
    "embedding": (
        Launch(
            "embedding.py:embedding_kernel",
            ("out",),
            "wait",
            why="what stands behind it finds the step's metadata complete",
        ),
    ),
    "rms_norm": (Launch("rms_norm.py:rms_norm_kernel", ("out", "residual"), "start", ("weight",)),),
    "route_experts": (
        Launch("route_experts.py:router_logits_kernel", SCRATCH, "start", ("weight",), case="scores"),
        Launch("route_experts.py:choose_experts_kernel", ("ids", "weights"), "start", case="choice"),
    ),
    "apply_experts": (
        Launch(
            "one_token.py:token_inner_kernel",
            SCRATCH,
            "start",
            ("shared_gate_up",),
            case="one token, inner numbers",
        ),
        Launch(
            "one_token.py:token_out_kernel", ("out",), "start", ("shared_down",), case="one token, output"
        ),
        Launch(
            "few_experts.cu:experts_gate_up",
            SCRATCH,
            "wait",
            ("shared_gate_up",),
            case="cuda, few tokens: gate and up",
            why="the kernel behind it reads ids and weights early",
        ),
        Launch(
            "few_experts.cu:experts_down",
            ("out",),
            "start",
            ("down", "shared_down"),
            case="cuda, few tokens: down",
            why="ids and weights were there when the kernel in front of it had waited",
            reads_of_ahead=("ids", "weights"),
        ),
        Launch("apply_experts.py:experts_inner_kernel", SCRATCH, "start", case="gate and up"),
        Launch("apply_experts.py:experts_down_kernel", SCRATCH, "start", case="down"),
        Launch("apply_experts.py:experts_sum_kernel", ("out",), "start", case="sum of a token's experts"),
    ),
    "act_and_mul": (Launch("act_and_mul.py:act_and_mul_kernel", ("out",), waits="launch"),),
    "gate_heads": (Launch("gate_heads.py:gate_heads_kernel", ("out",), "start"),),
    "linear": (
        Launch("linear.cu:linear", ("out",), "start", ("weight", "norm_weight"), case="1 to 8 tokens"),
        Launch(
            "linear.cu:linear",
            ("out",),
            "wait",
            ("weight", "norm_weight"),
            case="9 to 16 tokens; to 64 where there is no wgmma",
            why="at its start three kernels were in each other's way",
        ),
        Launch(
            "linear_wide.cu:linear_wide",
            ("out",),
            "issued",
            ("weight",),
            case="17 to 64 tokens on Hopper; 9 to 16 where CTAs share k",
            why="the next kernel loads its weights while this one adds its parts",
        ),
        Launch(
            "linear_large.cu:linear_large",
            ("out",),
            "issued",
            ("weight",),
            case="65 to 256 tokens on Hopper, some layers",
        ),
        Launch("linear_sum.cu:linear_sum", ("out",), "wait", case="the sum of its parts"),
        Launch(
            "norm.cu:rms_norm",
            SCRATCH,
            "start",
            ("norm_weight",),
            case="a norm that is not fused, before linear",
        ),
    ),
}


#: Weights, which no kernel of a step writes.
CONSTANTS = ("weight", "bias", "norm_weight", "up_keys", "up_values", "shared_gate_up", "shared_down", "down")


def reads_early() -> list[str]:
    """Ops with a kernel that reads early what a step may write."""
    return [
        op
        for op, launches in STREAM_ORDER.items()
        if any(set(launch.reads_early) - set(CONSTANTS) for launch in launches)
    ]
