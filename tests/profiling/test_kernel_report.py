"""Kernel reports: kernels and ops find their modules, replays are matched only where nothing is left
to guess."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchpaged import profiling
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.profiling.kernel_report import KernelReport, kernels_per_layer, layer_groups
from torchpaged.profiling.kernel_report.attribute import kernels_of_generation, match_kernels
from torchpaged.profiling.kernel_report.report import COMPILED, layer_of
from torchpaged.profiling.kernel_report.trace import module_ranges, parse, profiled

N = None


@pytest.mark.parametrize(
    ("eager", "replay", "partners"),
    [
        ("abcabc", "abcabc", [0, 1, 2, 3, 4, 5]),
        ("abc", "abxc", [0, 1, N, 2]),  # gained one
        ("abxc", "abc", [0, 1, 3]),  # lost one
        ("aab", "ab", [N, 2]),  # which of the two is it?
        # before A and after B there is one on both sides; between them one is gone
        ("gAgBg", "gABg", [0, 1, 3, 4]),
        ("ab", "ba", [N, N]),  # order and name contradict each other
        ("abc", "cab", [N, N, N]),
        ("xabyc", "xbayc", [0, N, N, 3, 4]),
        ("", "ab", [N, N]),
        ("ab", "", []),
        ("gngngnA", "gggA", [0, 2, 4, 6]),  # norms fused away, gemms kept
    ],
)
def test_matching_never_guesses(eager: str, replay: str, partners: list[int | None]) -> None:
    assert match_kernels(list(eager), list(replay)) == partners


def test_matching_is_right_where_it_speaks() -> None:
    """Random kernels dropped and added: whatever is matched keeps name and order, and what is unique on both
    sides is found."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        eager = [f"k{i}" for i in torch.randint(0, 12, (30,), generator=generator).tolist()]
        keep = (torch.rand(30, generator=generator) > 0.2).tolist()
        replay = [name for name, kept in zip(eager, keep, strict=True) if kept]
        replay.insert(int(torch.randint(0, len(replay), (1,), generator=generator)), "new")
        partners = match_kernels(eager, replay)
        found = [p for p in partners if p is not None]
        assert found == sorted(set(found))
        assert all(p is None or eager[p] == name for p, name in zip(partners, replay, strict=True))
        assert partners[replay.index("new")] is None


# ----------------------------------------------------------------------------------------------------- traces
def span(category: str, name: str, start: float, length: float, **arguments: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": length,
        "pid": 1,
        "tid": 7,
        "args": arguments,
    }


# as Kineto writes it: host ranges, launches by correlation, kernels later and on threads of their own
GPU_TRACE = [
    {"ph": "M", "name": "process_name", "pid": 1},
    span("user_annotation", "prefill batch=1 tokens=3", 0, 100),
    span("user_annotation", "module model.layers.0", 10, 50),
    span("user_annotation", "module model.layers.0.mlp", 20, 20),
    span("cuda_runtime", "cudaLaunchKernel", 25, 1, correlation=1),
    span("cuda_driver", "cuLaunchKernelEx", 45, 1, correlation=2),
    span("cuda_runtime", "cudaMemsetAsync", 70, 1, correlation=3),
    span("gpu_user_annotation", "module model.layers.0", 210, 50),
    {**span("kernel", "gemm", 210, 5.5, correlation=1), "tid": 20},
    {**span("kernel", "add", 216, 2, correlation=2), "tid": 20},
    {**span("gpu_memset", "Memset (Device)", 219, 1, correlation=3), "tid": 20},
    {**span("kernel", "stray", 221, 1, correlation=99), "tid": 20},
]


def test_kernels_go_to_the_innermost_module_around_their_launch() -> None:
    trace = parse(list(reversed(GPU_TRACE)))
    found = [(a.name, a.us, a.module, a.recorded) for a in trace.activities]
    assert found == [
        ("gemm", 5.5, "model.layers.0.mlp", True),
        ("add", 2, "model.layers.0", True),
        ("Memset (Device)", 1, None, True),
        ("stray", 1, None, False),
    ]
    assert trace.on_device
    assert trace.activities[0].ranges[0] == "prefill batch=1 tokens=3"
    report = kernels_of_generation(trace, nn.Identity())
    assert list(report["prefill"].rows.modules) == ["model.layers.0.mlp", "model.layers.0", None]
    # its launch was not recorded
    assert [list(row) for row in report["other"].rows.unmatched.values()] == [["stray"]]


class Toy(nn.Module):
    """Layers of a linear and, from the second on, a sine; a linear at the end."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(num_layers))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def replay_of(
    toy: Toy, change: Callable[[int, Tensor], Tensor] = lambda index, x: x, activation: Any = F.relu
) -> Callable[[], Tensor]:
    """The same ops without a module around them; ``change(index, x)`` runs after the linear of
    layer ``index``."""

    def run() -> Tensor:
        x = X
        for index, layer in enumerate(toy.layers):
            x = activation(change(index, F.linear(x, layer[0].weight, layer[0].bias)))
        return F.linear(x, toy.head.weight, toy.head.bias)

    return run


X = torch.ones(1, 4)


@torch.inference_mode()
def toy_report(*arguments: Any, **options: Any) -> KernelReport:
    toy = Toy()
    return kernels_per_layer(lambda: toy(X), toy, replay_of(toy, *arguments, **options))


def counts(report: KernelReport) -> dict[str | None, list[tuple[str, int]]]:
    rows = report.rows.modules
    return {module: [(name, runs.count) for name, runs in row.items()] for module, row in rows.items()}


WHOLE = {
    **{f"layers.{i}.{m}": [(op, 1)] for i in range(4) for m, op in ((0, "aten::linear"), (1, "aten::relu"))},
    "head": [("aten::linear", 1)],
}


def test_a_replay_without_modules_is_matched_whole() -> None:
    with torch.inference_mode():
        toy = Toy()
        assert counts(kernels_per_layer(lambda: toy(X), toy)) == WHOLE
    report = toy_report()
    assert report.is_complete
    assert counts(report) == WHOLE
    assert report.kind == "op"
    assert report.rows.total.total_us > 0


def test_what_is_new_in_a_replay_is_named_with_its_neighbours() -> None:
    report = toy_report(lambda index, x: x.sin() if index == 2 else x)
    assert counts(report) == WHOLE
    assert not report.missing
    assert not report.is_complete
    assert [(between, *row) for between, row in report.rows.unmatched.items()] == [
        (("layers.2.0", "layers.2.1"), "aten::sin")
    ]
    folded = [(group.name, group.kernels_each, group.unmatched_each) for group in layer_groups(report)]
    assert folded == [("layers.0-1,3", 2, 0), ("layers.2", 3, 1), ("head", 1, 0)]


def test_what_a_replay_lacks_is_named_with_its_module() -> None:
    report = toy_report(activation=lambda x: x)
    assert [(module, *row) for module, row in report.missing.items()] == [
        (f"layers.{i}.1", "aten::relu") for i in range(4)
    ]
    assert counts(report) == {name: ops for name, ops in WHOLE.items() if not name.endswith(".1")}


def test_reports_are_plain_data_and_a_table() -> None:
    rich = pytest.importorskip("rich.console", reason="rich is not installed")
    from torchpaged.profiling.kernel_report import report_table

    report = toy_report(lambda index, x: x.cos())
    data = json.loads(json.dumps(report.to_dict()))
    assert data["count"] == 13
    assert not data["complete"]
    assert data["layers"][0]["layers"] == "layers.0-3"
    assert data["layers"][0]["kernels_each"] == 3
    assert sum(m["count"] for m in data["modules"]) + sum(u["count"] for u in data["unmatched"]) == 13
    assert sum(m["share"] for m in (*data["modules"], *data["unmatched"])) == pytest.approx(1)
    console = rich.Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report_table(report, "decode"))
    text = console.export_text()
    assert "layers.0-3" in text
    assert "3 ops each" in text
    assert "unmatched, after 0 and before 1" in text
    assert "aten::cos" in text


def test_layer_names() -> None:
    assert layer_of("model.layers.3.mlp.up_proj") == ("model.layers", 3, "mlp.up_proj")
    assert layer_of("model.layers.3") == ("model.layers", 3, "")
    assert layer_of("model.norm") is None
    assert layer_of(None) is None
    assert layer_of("") is None


def test_a_step_that_runs_nothing_is_refused() -> None:
    with pytest.raises(ArgumentError, match="step: expected a call that runs kernels"):
        kernels_per_layer(lambda: None, Toy())


# ----------------------------------------------------------------------------------------------------- ranges
def test_module_ranges_end_with_an_exception_and_with_the_block() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.sin()
            raise KeyError

    model = nn.Sequential(nn.Linear(4, 4), Broken())

    def call() -> None:
        with pytest.raises(KeyError):
            model(X)
        torch.cos(X)

    with module_ranges(model):
        inside = profiled(call)
    found = {a.name: a.module for a in inside.activities}
    assert found == {"aten::linear": "0", "aten::sin": "1", "aten::cos": None}
    assert not any(a.module for a in profiled(call).activities), "the hooks stay behind"


def test_module_ranges_leave_compiled_code_alone() -> None:
    """Compiled inside the block as one graph, and without a range when it runs."""
    toy = Toy()
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(toy, fullgraph=True, backend=backend)
    with torch.inference_mode(), module_ranges(toy):
        compiled(X)
        trace = profiled(lambda: compiled(X))
        assert torch.equal(compiled(X), toy(X))
    assert len(graphs) == 1
    assert not any("record" in str(node.target) for node in graphs[0].graph.nodes)
    assert trace.activities
    assert all(a.module is None and a.is_compiled for a in trace.activities)
    with torch.inference_mode():
        report = kernels_per_layer(lambda: compiled(X), toy)
    assert not report.rows.modules, "unknown is not outside"
    assert list(report.rows.unmatched) == [(COMPILED, None)], "unknown is not outside"


# ------------------------------------------------------------------------------------------------- generation
def test_replays_of_a_generation_are_matched_with_a_step_of_their_bucket() -> None:
    """A trace with two replays of bucket 4, between a capture, which is left out, and sampling."""
    ops = ["aten::linear", "aten::relu"] * 4 + ["aten::linear"]
    events = [
        span("user_annotation", "capture padded=4", 0, 10),
        span("cuda_runtime", "cudaLaunchKernel", 5, 1, correlation=1),
        span("kernel", "warm-up", 6, 1, correlation=1),
    ]
    for launch, start in ((2, 100), (3, 1000)):
        events += [
            span("user_annotation", "decode batch=3 tokens=3", start, 100),
            span("user_annotation", "replay batch=3 padded=4", start + 1, 50),
            span("cuda_runtime", "cudaGraphLaunch", start + 2, 1, correlation=launch),
            span("cuda_runtime", "cudaMemcpyAsync", start + 60, 1, correlation=launch + 10),
            *(
                span("kernel", name, start + 100 + 2 * i, 2, correlation=launch)
                for i, name in enumerate([*ops, "sample"])
            ),
            span("gpu_memcpy", "Memcpy DtoH", start + 200, 1, correlation=launch + 10),
        ]
    toy, asked = Toy(), []

    def launch_eager(rows: int) -> Tensor:
        asked.append(rows)
        return toy(X)

    with torch.inference_mode():
        reports = kernels_of_generation(parse(events), toy, launch_eager)
    assert set(reports) == {"decode"}
    assert set(asked) == {4}
    report = reports["decode"]
    assert report.steps == 2
    assert report.rows.total.count == 22
    assert report.rows.total.total_us == 42
    assert counts(report) == {
        None: [("Memcpy DtoH", 2)],
        **{name: [(op, 2) for op, _ in found] for name, found in WHOLE.items()},
    }
    unmatched = [(between, *row, row.total.count) for between, row in report.rows.unmatched.items()]
    assert unmatched == [(("head", ""), "sample", 2)]
    assert [group.kernels_each for group in layer_groups(report) if group.indices] == [2]
    assert not list(kernels_of_generation(parse(events), toy)["decode"].rows.modules)[1:], (
        "without a step to match with, nothing is claimed"
    )


def test_replays_of_prefills_are_matched_with_a_prefill_of_their_bucket() -> None:
    """Two prefills from a graph and one launched from Python; a decode step of as many rows is not asked."""
    ops, events = ["aten::linear", "aten::relu"] * 4 + ["aten::linear"], []
    for launch, start, said in ((2, 100, "batch=1 tokens=3"), (3, 1000, "batch=2 tokens=3 decodes=1")):
        events += [
            span("user_annotation", f"prefill {said} padded=4", start, 100),
            span("cuda_runtime", "cudaGraphLaunch", start + 2, 1, correlation=launch),
            *(span("kernel", name, start + 100 + 2 * i, 2, correlation=launch) for i, name in enumerate(ops)),
        ]
    events += [
        span("user_annotation", "prefill batch=1 tokens=9", 2000, 100),
        span("cuda_runtime", "cudaLaunchKernel", 2001, 1, correlation=4),
        span("kernel", "alone", 2002, 2, correlation=4),
    ]
    toy, asked = Toy(), []

    def prefill_eager(requests: int, tokens: int) -> Tensor:
        asked.append((requests, tokens))
        return toy(X)

    def never(rows: int) -> Tensor:
        raise AssertionError(rows)

    with torch.inference_mode():
        report = kernels_of_generation(parse(events), toy, never, prefill_eager)["prefill"]
    assert set(asked) == {(1, 4), (2, 4)}
    assert report.steps == 3
    assert report.is_complete
    assert counts(report) == {
        None: [("alone", 1)],
        **{name: [(op, 2) for op, _ in found] for name, found in WHOLE.items()},
    }


def test_a_model_through_the_runner(make_llama: Callable[..., Any]) -> None:
    """A tape's replay has no modules and adds copies of its own: all of the model's ops are found, the copies
    are not claimed."""
    from torchpaged.graphs import DecodeGraphRunner, TapeCapture
    from torchpaged.hf import PagedModel

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3}
    model = make_llama(vocab_size=99, **sizes, max_position_embeddings=64)
    paged = PagedModel(model, num_blocks=20, block_size=4)
    runner = DecodeGraphRunner(
        lambda input_ids, metadata: paged(input_ids, metadata),
        max_batch_size=2,
        max_blocks_per_req=4,
        block_size=4,
        buckets=[2],
        compile=False,
        capture=TapeCapture(),
        ranges=profiling.range,
    )
    runner.capture()
    eager = kernels_per_layer(lambda: runner.run_eager([5, 6], [1, 1], [[1], [2]]), model)
    replayed = kernels_per_layer(
        lambda: runner.run_eager([5, 6], [1, 1], [[1], [2]]), model, lambda: runner.replay(2)
    )
    in_model = {name: ops for name, ops in counts(eager).items() if name}
    assert {name: ops for name, ops in counts(replayed).items() if name} == in_model
    assert ("torchpaged::paged_attention", 1) in in_model["model.layers.2.self_attn"]
    assert in_model["model.layers.1.mlp.down_proj"] == in_model["lm_head"] == [("aten::linear", 1)]
    assert {name for row in replayed.rows.unmatched.values() for name in row} <= {
        "aten::copy_",
        "aten::slice",
    }
    assert [group.name for group in layer_groups(replayed) if group.indices] == ["model.layers.0-2"]


def test_a_gpu_without_recorded_kernels_is_not_told_by_ops() -> None:
    """torch.profiler under Nsight Systems: a report of one op and none missing would look like an answer."""

    class OnGpu(nn.Linear):
        def parameters(self, recurse: bool = True) -> Any:
            return iter([SimpleNamespace(is_cuda=True)])

    model = OnGpu(4, 4)
    with pytest.raises(profiling.ProfilingUnavailableError, match="process without it"):
        kernels_per_layer(lambda: model(torch.zeros(1, 4)), model)
    with pytest.raises(profiling.ProfilingUnavailableError, match="process without it"):
        kernels_of_generation(profiled(lambda: model(torch.zeros(1, 4))), model)
