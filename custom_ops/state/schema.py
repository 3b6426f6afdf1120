"""Schemas of ``causal_conv``, ``linear_attention`` and what lies around them in a layer. The rules that every
op keeps: registry.py.

These two take a packed batch, prefill, decode or mixed, and pools with a slot per request. ``state_slots
[B]`` int32: the slots, 0 for a row that has none: such a row writes nothing and gives zeros. ``seq_lens
[B]`` and ``query_start_loc [B + 1]`` int32 as in paged_attention: a request that begins (``seq_len <=
query_len``) begins from zeros, whatever its slot holds; a token at a position below 0 (left padding) gives
zeros and leaves no trace. Rows that write have slots of their own.
"""

_BATCH = "Tensor state_slots, Tensor seq_lens, Tensor query_start_loc"

SCHEMAS = {
    # A depthwise causal convolution over tokens, out[t] = act(bias + sum_w weight[:, w] x[t - W + 1 + w]).
    # x, out [T, channels]; weight [channels, W], W from 2 to 8; bias [channels]; conv_state [num_slots,
    # W - 1, channels], a request's last inputs, the newest last; activation: "none" or "silu". in_gate,
    # out_gate [T, channels]: factors of the inputs, rounded to x's dtype, as the state has them; and of what
    # the activation gives.
    "causal_conv": f"""(Tensor x, Tensor weight, Tensor(a!) conv_state, {_BATCH}, Tensor(b!) out,
        Tensor? bias=None, *, SymInt max_query_len, str activation="none", Tensor? in_gate=None,
        Tensor? out_gate=None) -> ()""",
    # Per head, over a matrix S [key_dim, value_dim]: S = exp(g) S; u = beta (v - S^T k) with delta_rule and
    # beta v without; S = S + k u^T; out = scale S^T q. q, k [T, num_key_heads, key_dim], each of
    # num_heads / num_key_heads value heads that stand together; v, out [T, num_heads, value_dim], out in
    # float32 or v's dtype; g float32, the logarithm of the decay, [T, num_heads], or [T, num_heads, key_dim]
    # with one for each row of S; beta [T, num_heads], 1 if None; state [num_slots, num_heads, key_dim,
    # value_dim], rounded to its dtype at the end of a call alone; normalize: q and k are divided by their
    # norms first, x / sqrt(sum(x x) + 1e-6).
    "linear_attention": f"""(Tensor q, Tensor k, Tensor v, Tensor g, Tensor(a!) state, {_BATCH},
        Tensor(b!) out, Tensor? beta=None, *, SymInt max_query_len, float scale, bool delta_rule=False,
        bool normalize=False) -> ()""",
    # The decay and beta of a gated delta net: g = -exp(a_log) step, beta = beta_scale sigmoid(b), with step =
    # softplus(a + dt_bias), at least min_step and at most max_step. Without b as Mamba 2's: beta = step. With
    # a bound, a number below 0, g = bound sigmoid(exp(a_log) (a + dt_bias)). a, b [T, groups, num_heads /
    # groups], the heads of a group side by side; a_log, dt_bias [num_heads] in a's dtype or float32; g, beta
    # [T, num_heads] float32, float64 over float64. Where rows of the state decay one by one, as in Kimi delta
    # attention, a, g and dt_bias have num_heads * key_dim numbers in the place of num_heads, and so has beta
    # without b.
    "delta_gates": """(Tensor a, Tensor? b, Tensor a_log, Tensor dt_bias, Tensor(a!) g, Tensor(b!) beta, *,
        float beta_scale=1., float min_step=0., float? max_step=None, float? bound=None) -> ()""",
    # RMSNorm of each head, then its gate: out = x / rms(x) weight act(gate), with activation "silu" or
    # "sigmoid". With gate_first as Mamba 2's: y = x act(gate), out = y / rms(y) weight. x, out [T, num_heads,
    # width]; gate [T, groups, num_heads * width / groups], the heads of a group side by side; weight [width],
    # or [num_heads, width] with one of each head, in x's dtype or float32. skip, skip_weight: what is added
    # to x before anything else, skip [T, skip_heads, num_heads * width / skip_heads] times skip_weight
    # [skip_heads], in x's dtype or float32.
    "gated_rms_norm": """(Tensor x, Tensor gate, Tensor weight, Tensor(a!) out, *, float eps=1e-6,
        bool gate_first=False, Tensor? skip=None, Tensor? skip_weight=None,
        str activation="silu") -> ()""",
    # A gated delta net, or Kimi delta attention with a decay per row of the state, from projections to what
    # the output projection takes: causal_conv of x with silu, delta_gates, linear_attention with the delta
    # rule over normalised keys, gated_rms_norm without gate_first. Between these q, k, v and results are in
    # x's dtype, g and beta in float32. x, out: in one dtype; x [T, channels], the queries, keys and values of
    # all heads side by side; out [T, num_heads, value_dim]; norm_weight: gated_rms_norm's weight; new_step:
    # promises that seq_lens was written behind these slots, so that they may be read early
    # (docs/stream_order.md), and changes no result; the others: as those of the four.
    "delta_step": f"""(Tensor x, Tensor weight, Tensor(a!) conv_state, Tensor a, Tensor b, Tensor a_log,
        Tensor dt_bias, Tensor(b!) state, Tensor gate, Tensor norm_weight, {_BATCH}, Tensor(c!) out,
        Tensor? bias=None, *, SymInt max_query_len=1, float scale, float beta_scale=1., float? bound=None,
        float eps=1e-6, str activation="silu", bool new_step=False) -> ()""",
    # Single tokens of Mamba 2, from its projection to what the output projection, or a norm before it, takes:
    # causal_conv of x with silu, delta_gates without b, linear_attention, then out = (y + skip_weight v)
    # silu(gate), without gate y + skip_weight v. Rows have at most one token. Between these values, keys and
    # queries are in x's dtype, all else in float32. x [T, channels]: values v of all heads, keys and queries
    # of all groups, side by side; dt [T, num_heads], delta_gates' a; skip_weight [num_heads] in x's dtype or
    # float32; gate, out [T, num_heads, value_dim] in x's dtype; semaphore: int32 zeros, at least B * groups,
    # zeros again afterwards; calls that may overlap need their own; new_step: delta_step's; beside: promises
    # that a paged_attention stands right in front, which shares no memory with this call but what both read;
    # it may then run while that one does, and changes no result. The others: as those of the three.
    "mamba2_step": f"""(Tensor x, Tensor weight, Tensor(a!) conv_state, Tensor dt, Tensor a_log,
        Tensor dt_bias, Tensor(b!) state, Tensor skip_weight, {_BATCH}, Tensor(c!) out, Tensor? bias=None, *,
        Tensor? gate=None, float min_step=0., float? max_step=None, Tensor(d!)? semaphore=None,
        bool new_step=False, bool beside=False) -> ()""",
    # Mamba 1's selective scan, whose channels are heads of one value: step = softplus(dt + dt_bias), then
    # linear_attention with q = c, k = b, v = x, beta = step and g = -exp(a_log) step, and out = (y +
    # skip_weight x) silu(gate), without gate y + skip_weight x. Between these all is in float32, float64 over
    # float64. x, dt, gate, out [T, channels], b, c [T, key_dim] in one dtype; a_log [channels, key_dim],
    # dt_bias, skip_weight [channels] in x's dtype or float32; state [num_slots, channels, key_dim, 1].
    "selective_scan": f"""(Tensor x, Tensor dt, Tensor a_log, Tensor dt_bias, Tensor b, Tensor c,
        Tensor skip_weight, Tensor(a!) state, {_BATCH}, Tensor(b!) out, Tensor? gate=None, *,
        SymInt max_query_len) -> ()""",
    # RecurrentGemma's recurrence, of one number per channel: with a gate's product(x) = x W + bias by blocks
    # of channels, log_a = -8 softplus(recurrent_param) sigmoid(recurrent product), h = exp(log_a) h +
    # sqrt(1 - exp(2 log_a)) sigmoid(input product) x, without the root for a request's first token, and
    # out = h gate, without gate h. In float32, float64 over float64. x, gate, out [T, channels] in one dtype;
    # weights [blocks, width, width], biases [blocks, width], recurrent_param [channels] in x's dtype or
    # float32, blocks * width = channels; state [num_slots, channels, 1, 1].
    "rg_lru": f"""(Tensor x, Tensor input_weight, Tensor input_bias, Tensor recurrent_weight,
        Tensor recurrent_bias, Tensor recurrent_param, Tensor(a!) state, {_BATCH}, Tensor(b!) out,
        Tensor? gate=None, *, SymInt max_query_len) -> ()""",
}
