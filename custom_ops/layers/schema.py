"""Schemas of the ops around attention. The rules that every op keeps: registry.py."""

SCHEMAS = {
    # input_ids [T] int64, weight [vocab_size, hidden_size], out [T, hidden_size] = weight[input_ids], times
    # scale (no dimensions, rounded to weight's dtype first) if given. An id outside is an error where values
    # are checked, else a row of NaN.
    "embedding": "(Tensor input_ids, Tensor weight, Tensor(a!) out, *, Tensor? scale=None) -> ()",
    # x, out [T, hidden_size], weight [hidden_size]; out = x / rms(x) * (weight + offset). With residual [T,
    # hidden_size]: residual += x first, and the sum is normed. With post_residual [T, hidden_size]: added to
    # the normed x (Gemma's norms after a block).
    "rms_norm": """(Tensor x, Tensor weight, Tensor(a!) out, *, float eps=1e-6, float offset=0.0,
        Tensor(b!)? residual=None, Tensor? post_residual=None) -> ()""",
    # gate_up [T, 2 * I], gate in the first half; out [T, I] = activation(gate) * up. activation: "silu",
    # "gelu_tanh" or "gelu"
    "act_and_mul": """(Tensor gate_up, Tensor(a!) out, *, str activation="silu") -> ()""",
    # x, out [T, num_heads, width], gate of that shape or [T, num_heads, 1], in one dtype; out = x *
    # sigmoid(gate)
    "gate_heads": "(Tensor x, Tensor gate, Tensor(a!) out) -> ()",
    # x [T, K], weight [N, K], out [T, N] = (x' @ weight.T + bias [N]) * scale [N] + residual [T, N]. x' =
    # rms_norm(x, norm_weight [K]) if given, else x. activation not "none": weight holds gate rows, then as
    # many up rows, and out [T, N / 2] = activation(gate) * up of what scale gives, then + residual. scale:
    # float32, float64 over float64. weight and norm_weight are constants of a step, and read early
    # (docs/stream_order.md).
    "linear": """(Tensor x, Tensor weight, Tensor(a!) out, *, Tensor? bias=None, Tensor? scale=None,
        Tensor? residual=None, Tensor? norm_weight=None, float norm_eps=1e-6, float norm_offset=0.0,
        str activation="none") -> ()""",
}
