// apply_experts: checks in the words of custom_ops/experts/check.py; each expert's products, for its tokens
// alone, are those of the op linear.
#include <cmath>
#include <cstring>
#include <vector>

#include "../../cpu/operands.h"
#include "../../layers/cpu/linear_kernel.h"

namespace torchpaged {
namespace {

constexpr int64_t MAX_TOKENS = 64, MAX_TOP_K = 32;  // custom_ops/experts/limits.py

struct Mlp { Operand gate_up, down; int64_t inner; };

struct Experts {
  Operand x, out, shared_gate, residual;
  Mlp experts, shared;
  const int32_t* ids;
  const float* weights;
  int64_t tokens, top_k, num_experts, hidden;
  Gate gate;
};

void* at(const Operand& t, int64_t element) {
  return static_cast<char*>(t.data) + element * size_of(t.dtype);
}

Linear product(const Operand& x, int64_t tokens, int64_t inputs, const Operand& weight, int64_t outputs,
               const Operand& out) {
  Linear p{};
  p.x = x; p.tokens = tokens; p.inputs = inputs;
  p.weight = weight; p.outputs = outputs; p.out = out;
  return p;
}

// A token's choice of an expert.
struct Pair { int32_t expert, token; float weight; };

// A: what is summed in.
template <typename A>
class Run {
 public:
  explicit Run(const Experts& c) : c(c), pairs(by_expert()), y(c.tokens * c.hidden) {
    int64_t most = c.shared.down.data ? c.tokens : 0;  // tokens of an expert
    each_expert([&](const Pair*, int64_t count) { most = std::max(most, count); });
    x.resize(most * c.hidden * size_of(c.x.dtype));
    inner.resize(most * std::max(c.experts.inner, c.shared.inner) * size_of(c.x.dtype));
    parts.resize(most * c.hidden);
  }

  void run() {
    each_expert([&](const Pair* first, int64_t count) { add_expert(first, count); });
    if (c.shared.down.data) add_shared();
    Linear sums = product(c.x, c.tokens, 0, c.x, c.hidden, c.out);
    sums.residual = c.residual;
    store_sums(sums, y.data());
  }

 private:
  const Experts& c;
  const std::vector<Pair> pairs;
  std::vector<char> x, inner;  // of the tokens of one expert
  std::vector<A> parts, y;
  static constexpr Number SUMS = sizeof(A) == 8 ? Number::Double : Number::Float;

  // By expert, those outside left out. A token's experts are summed by their ids, whatever others chose.
  std::vector<Pair> by_expert() const {
    std::vector<Pair> found;
    found.reserve(c.tokens * c.top_k);
    for (int64_t i = 0; i < c.tokens * c.top_k; ++i)
      if (c.ids[i] >= 0 && c.ids[i] < c.num_experts)
        found.push_back({c.ids[i], int32_t(i / c.top_k), c.weights[i]});
    std::stable_sort(found.begin(), found.end(),
                     [](const Pair& a, const Pair& b) { return a.expert < b.expert; });
    return found;
  }

  // body(first, count) of the pairs of each expert.
  template <typename Body>
  void each_expert(const Body& body) const {
    for (size_t i = 0, n; i < pairs.size(); i += n) {
      for (n = 1; i + n < pairs.size() && pairs[i + n].expert == pairs[i].expert; ++n) {}
      body(pairs.data() + i, int64_t(n));
    }
  }

  // `parts` of some tokens.
  void multiply(const Operand& from, int64_t tokens, const Mlp& mlp, int64_t expert) {
    const auto weight = [&](const Operand& all) -> Operand {
      return {all.dtype, at(all, expert * all.token), all.head, 1};
    };
    const Operand between = {c.x.dtype, inner.data(), mlp.inner, 1};
    Linear first = product(from, tokens, c.hidden, weight(mlp.gate_up), 2 * mlp.inner, between);
    first.gate = c.gate;
    run_linear(first);
    run_linear(product(between, tokens, mlp.inner, weight(mlp.down), c.hidden,
                       {SUMS, parts.data(), c.hidden, 1}));
  }

  void add_expert(const Pair* mine, int64_t count) {
    Operand from = {c.x.dtype, at(c.x, mine->token * c.x.token), c.x.token, 1};
    if (count > 1) {
      const int64_t bytes = c.hidden * size_of(c.x.dtype);
      for (int64_t i = 0; i < count; ++i)
        std::memcpy(x.data() + i * bytes, at(c.x, mine[i].token * c.x.token), bytes);
      from = {c.x.dtype, x.data(), c.hidden, 1};
    }
    multiply(from, count, c.experts, mine->expert);
    for (int64_t i = 0; i < count; ++i) add(mine[i].token, i, A(mine[i].weight));
  }

  void add(int64_t token, int64_t part, A weight) {
    A* const __restrict to = y.data() + token * c.hidden;
    const A* const __restrict from = parts.data() + part * c.hidden;
    for (int64_t i = 0; i < c.hidden; ++i) to[i] += weight * from[i];
  }

  void add_shared() {
    std::vector<A> gates(c.tokens);
    if (c.shared_gate.data)
      run_linear(product(c.x, c.tokens, c.hidden, c.shared_gate, 1, {SUMS, gates.data(), 1, 1}));
    multiply(c.x, c.tokens, c.shared, 0);
    for (int64_t t = 0; t < c.tokens; ++t)
      add(t, t, c.shared_gate.data ? 1 / (1 + std::exp(-gates[t])) : A(1));
  }
};

Gate activation_of(const std::string& activation) {
  STD_TORCH_CHECK(activation != "none", "activation: expected one of silu, gelu_tanh, gelu, got 'none'");
  return gate_of(activation);
}

}  // namespace

void apply_experts(Tensor x, Tensor gate_up, Tensor down, Tensor ids, Tensor weights, Tensor out,
                   std::string activation, std::optional<Tensor> shared_gate_up,
                   std::optional<Tensor> shared_down, std::optional<Tensor> shared_gate,
                   std::optional<Tensor> residual) {
  Experts c{};
  c.x = operand("x", x, {-1, -1});
  c.tokens = x.size(0); c.hidden = x.size(1);
  STD_TORCH_CHECK(c.tokens <= MAX_TOKENS, "x: expected at most ", MAX_TOKENS, " tokens, got ", c.tokens);
  c.experts.down = operand("down", down, {-1, c.hidden, -1});
  c.num_experts = down.size(0); c.experts.inner = down.size(2);
  c.experts.gate_up = operand("gate_up", gate_up, {c.num_experts, 2 * c.experts.inner, c.hidden});
  check_dims("ids", ids, {c.tokens, -1});
  check_dtype("ids", ids, ScalarType::Int, "torch.int32");
  c.top_k = ids.size(1);
  STD_TORCH_CHECK(c.top_k > 0 && c.top_k <= MAX_TOP_K, "ids: expected 1 to ", MAX_TOP_K,
                  " experts per token, got ", c.top_k);
  check_dims("weights", weights, {c.tokens, c.top_k});
  check_dtype("weights", weights, ScalarType::Float, "torch.float32");
  for (const Named& each : {Named{"ids", &ids}, Named{"weights", &weights}}) {
    check_cpu(each.name, *each.tensor);
    check_last_dim(each.name, *each.tensor);
    STD_TORCH_CHECK(c.tokens < 2 || each.tensor->stride(0) == c.top_k, each.name,
                    ": expected a contiguous tensor, got a stride of ", each.tensor->stride(0));
  }
  c.ids = data<int32_t>(ids);
  c.weights = data<float>(weights);
  c.out = operand("out", out, {c.tokens, c.hidden});
  c.gate = activation_of(activation);
  STD_TORCH_CHECK(shared_gate_up.has_value() == shared_down.has_value(),
                  "shared_down: expected both shared_gate_up and shared_down, or neither, got one of them");
  STD_TORCH_CHECK(shared_down || !shared_gate,
                  "shared_gate: expected None without shared_down, got a tensor");
  if (shared_down) {
    const auto one = [](const Operand& t) -> Operand { return {t.dtype, t.data, 0, t.token}; };
    c.shared.down = one(operand("shared_down", *shared_down, {c.hidden, -1}));
    c.shared.inner = shared_down->size(1);
    c.shared.gate_up = one(operand("shared_gate_up", *shared_gate_up, {2 * c.shared.inner, c.hidden}));
  }
  if (shared_gate) c.shared_gate = operand("shared_gate", *shared_gate, {c.hidden});
  if (residual) c.residual = operand("residual", *residual, {c.tokens, c.hidden});
  const Named same[] = {{"gate_up", &gate_up}, {"down", &down}, {"out", &out},
                        {"shared_gate_up", pointer(shared_gate_up)}, {"shared_down", pointer(shared_down)},
                        {"shared_gate", pointer(shared_gate)}, {"residual", pointer(residual)}};
  for (const Named& each : same)
    if (each.tensor) check_as(each.name, *each.tensor, x.scalar_type(), x.scalar_type());
  check_written("out", out, {{"x", &x}, {"gate_up", &gate_up}, {"down", &down}, {"ids", &ids},
                             {"weights", &weights}, {"shared_gate_up", pointer(shared_gate_up)},
                             {"shared_down", pointer(shared_down)}, {"shared_gate", pointer(shared_gate)},
                             {"residual", pointer(residual)}});
  if (!c.tokens || !c.hidden) return;
  if (c.x.dtype == Number::Double) Run<double>(c).run();
  else Run<float>(c).run();
}
REGISTER_OP(apply_experts)

}  // namespace torchpaged
