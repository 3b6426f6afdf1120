"""Schemas of the ops of mixtures of experts. The rules that every op keeps: registry.py."""

SCHEMAS = {
    # x [T, hidden_size], weight [num_experts, hidden_size] of x's dtype or float32. ids [T, top_k] int32 and
    # weights [T, top_k] float32: of each token's experts, best first. scores = scoring(x @ weight.T), in
    # float32, scoring "softmax" or "sigmoid". The highest scores + bias [num_experts] are chosen, of equals
    # the lowest id. top_groups < num_groups: only out of that many of the groups of consecutive experts,
    # those whose group_best highest have the largest sum. weights are the scores of the chosen; norm_eps
    # given: divided by their sum + norm_eps; then times scale.
    "route_experts": """(Tensor x, Tensor weight, Tensor(a!) ids, Tensor(b!) weights, *, Tensor? bias=None,
        str scoring="softmax", int num_groups=1, int top_groups=1, int group_best=1, float? norm_eps=None,
        float scale=1.0) -> ()""",
    # x, out [T, hidden_size], T <= 64. gate_up [num_experts, 2 * I, hidden_size], gate rows first; down
    # [num_experts, hidden_size, I]. ids [T, top_k] int32, top_k <= 32; one outside the experts adds nothing.
    # weights [T, top_k] float32. out[t] = sum over j of weights[t, j] * down[e] @ (activation(gate) * up),
    # e = ids[t, j], gate and up = gate_up[e] @ x[t]; + shared[t] + residual [T, hidden_size]. shared: of
    # shared_gate_up [2 * S, hidden_size] and shared_down [hidden_size, S], as of an expert; times
    # sigmoid(x[t] @ shared_gate [hidden_size]) if that is given.
    "apply_experts": """(Tensor x, Tensor gate_up, Tensor down, Tensor ids, Tensor weights, Tensor(a!) out, *,
        str activation="silu", Tensor? shared_gate_up=None, Tensor? shared_down=None,
        Tensor? shared_gate=None, Tensor? residual=None) -> ()""",
}
