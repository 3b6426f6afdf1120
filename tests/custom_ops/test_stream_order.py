"""The table of stream order says what sources and PTX do: waits, triggers, fences, early launches, and the
one rule that follows."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cuda_sources import compiled, needs_nvcc
from stream_order import CONTEXT, STREAM_ORDER, TRIGGERS, WAITS, Launch, reads_early

from torchpaged.custom_ops.early_launch import READS_EARLY
from torchpaged.custom_ops.registry import SCHEMAS

ROOT = Path(__file__).parents[2]
LAUNCHES = [(op, launch) for op, launches in STREAM_ORDER.items() for launch in launches]
KERNELS = sorted({launch.kernel for _, launch in LAUNCHES})
QUERY_TOKEN_WRITES = ("write_kv", "rope_write_kv", "rope_write_latent")
SIGNALS = {"gdc_wait": "wait", "gdc_launch_dependents": "trigger", "fence": "fence"}


def source_of(kernel: str) -> Path:
    name = kernel.split(":")[0]
    found = [
        path
        for path in (ROOT / "custom_ops").rglob(name)
        if defines(path.read_text(), kernel.split(":")[1], path.suffix)
    ]
    assert len(found) == 1, (kernel, found)
    return found[0]


def defines(text: str, function: str, suffix: str) -> bool:
    return bool(
        re.search(
            rf"^def {function}\(" if suffix == ".py" else rf"__global__ void [^;{{]*\b{function}\(",
            text,
            re.M,
        )
    )


@functools.cache
def functions_of_the_package() -> dict[str, ast.FunctionDef]:
    """Every function of the Triton kernels' files by name, also those that a kernel calls."""
    files = [path for path in (ROOT / "custom_ops").rglob("*.py") if "triton.jit" in path.read_text()]
    nodes = [node for path in files for node in ast.parse(path.read_text()).body]
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}


def signals(name: str, functions: dict[str, ast.FunctionDef], seen: tuple[str, ...] = ()) -> set[str]:
    """What a Triton kernel may issue, by itself or in the functions that it calls."""
    if name not in functions or name in seen:
        return set()
    found: set[str] = set()
    for call in (node for node in ast.walk(functions[name]) if isinstance(node, ast.Call)):
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        found |= {SIGNALS[called]} if called in SIGNALS else signals(called, functions, (*seen, name))
    return found


def said(kernel: str) -> set[str]:
    """What the table says that a kernel issues, in one case or another."""
    rows = [launch for _, launch in LAUNCHES if launch.kernel == kernel]
    words = {"wait" for row in rows if row.waits != "launch"} | {
        "trigger" for row in rows if row.triggers != "never"
    }
    return words | {"fence" for row in rows if row.fence}


def test_every_op_is_there_and_nothing_else() -> None:
    assert list(STREAM_ORDER)
    assert set(STREAM_ORDER) == set(SCHEMAS)
    for op, launch in LAUNCHES:
        assert launch.waits in WAITS, (op, launch)
        assert launch.triggers in TRIGGERS, (op, launch)
        assert launch.early or not launch.reads_early, (op, launch)
        arguments = re.findall(r"\bTensor(?:\([a-z]!\))?\??\s+(\w+)", SCHEMAS[op])
        for tensor in (*launch.writes, *launch.reads_early, *launch.reads_of_ahead):
            assert " " in tensor or tensor in (*arguments, "everything", "scratch"), (
                f"{op} has no argument {tensor}"
            )


def test_the_ops_that_traces_look_at_are_those_of_the_table() -> None:
    assert list(READS_EARLY) == reads_early()


def test_it_is_data() -> None:
    """A script loads it by its path, without torch."""
    code = (
        "import runpy, sys; assert "
        f"runpy.run_path({str(ROOT / 'tests/support/stream_order.py')!r})['STREAM_ORDER']; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def writers(tensor: str) -> list[tuple[str, Launch]]:
    return [(op, launch) for op, launch in LAUNCHES if tensor in launch.writes]


def test_what_is_read_early_is_written_by_kernels_that_hold_back() -> None:
    """The rule that all of this rests on: a trigger before the stores would let a reader begin before they
    are there."""
    read = {tensor for _, launch in LAUNCHES for tensor in launch.reads_early} - {"everything"}
    assert {"seq_lens", "block_table", CONTEXT, "weight"} <= read
    checked = 0
    for tensor in read:
        for op, launch in writers(tensor):
            assert launch.triggers == "never", (
                f"{op} writes {tensor}, which is read early, and lets dependents start: {launch}"
            )
            checked += 1
    assert checked > 10
    assert not writers("weight"), "constants of a step"
    assert not writers("norm_weight"), "constants of a step"
    assert not writers("block_table"), "constants of a step"
    assert all(launch.fence for _, launch in writers(CONTEXT)), (
        "what is copied before a wait must be visible when its writer ends"
    )


def test_what_a_kernel_in_front_has_waited_for() -> None:
    """Whatever may have written it: the op's own kernel in front lets this one begin behind its wait, and
    does not write it."""
    found = 0
    for op, launches in STREAM_ORDER.items():
        for n, launch in enumerate(launches):
            if launch.reads_of_ahead:
                ahead = launches[n - 1] if n else None
                assert ahead is not None and (ahead.waits, ahead.triggers) == ("first", "wait"), (op, launch)
                assert not set(ahead.writes) & set(launch.reads_of_ahead), (op, launch)
                found += 1
    assert found


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel.split(":")[0].endswith(".py")])
def test_triton_sources(kernel: str) -> None:
    source_of(kernel)
    assert signals(kernel.split(":")[1], functions_of_the_package()) == said(kernel)


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel.split(":")[0].endswith(".cu")])
def test_cuda_sources(kernel: str) -> None:
    code = code_of(source_of(kernel))
    found = {
        word
        for word, text in (("wait", "griddepcontrol.wait"), ("trigger", "griddepcontrol.launch_dependents"))
        if text in code
    }
    assert found == said(kernel)


def code_of(path: Path) -> str:
    """A CUDA source and all that it includes, comments left out."""
    found, new = dict[str, str](), {path.name: path.read_text()}
    while new:
        found |= new
        names = set(re.findall(r'#include "(?:[^"/]*/)*([^"/]+)"', "\n".join(new.values()))) - set(found)
        new = {name: next((ROOT / "custom_ops").rglob(name)).read_text() for name in names}
    return re.sub(r"//[^\n]*", "", "\n".join(found.values()))


def test_every_kernel_that_is_launched_early_is_there() -> None:
    """By the launching code: who passes Triton's early launch options, or PDL to a CUDA kernel."""
    functions = functions_of_the_package()
    waiting = {name for name in functions if name.endswith("_kernel") and "wait" in signals(name, functions)}
    assert waiting == {
        launch.kernel.split(":")[1] for _, launch in LAUNCHES if launch.early and ".py:" in launch.kernel
    }
    code = {path.name: code_of(path) for path in (ROOT / "custom_ops").rglob("*.cu")}
    rows = [launch for _, launch in LAUNCHES if ".cu:" in launch.kernel]
    assert {name for name in code if "griddepcontrol.wait" in code[name]} == {
        row.kernel.split(":")[0] for row in rows if row.early
    }
    assert {name for name in code if "griddepcontrol" in code[name]} <= {
        row.kernel.split(":")[0] for row in rows
    }


def test_launch_options_are_given_to_kernels_that_wait_alone() -> None:
    """A kernel that is launched early and does not wait would read and write ahead of everything."""
    asking = {
        path.name
        for path in (ROOT / "custom_ops").rglob("*.py")
        if re.search(r"\b(early_launch|decode_options)\(", path.read_text())
    }
    early = {launch.kernel.split(":")[0] for _, launch in LAUNCHES if launch.early}
    assert (
        {"write_kv.py", "embedding.py"}
        <= asking
        <= early | {"config.py", "launching.py", "paged_attention.py"}
    )
    ordinary = {
        path.name
        for path in (ROOT / "custom_ops").rglob("*.py")
        if re.search(r"\bearly=False", path.read_text())
    }
    kernels = {
        launch.kernel.split(":")[0].removesuffix(".cu")
        for _, launch in LAUNCHES
        if ".cu:" in launch.kernel and not launch.early
    }
    assert ordinary == {f"{name}.py" for name in kernels}


# -------------------------------------------------------------------------------------------------------- PTX
def order(ptx: str) -> list[str]:
    """What orders a kernel and its neighbours, in the order of the code: wait, trigger, fence, first load,
    first store."""
    names = {
        "griddepcontrol.wait": "wait",
        "griddepcontrol.launch_dependents": "trigger",
        "fence.acq_rel.gpu": "fence",
    }
    found = re.findall(
        r"griddepcontrol\.\w+|fence\.acq_rel\.gpu|"
        r"\bld\.(?:\w+\.)*global|\bst\.(?:\w+\.)*global|cp\.async\.c[ag]",
        ptx,
    )
    steps = [names.get(step, "store" if step.startswith("st") else "load") for step in found]
    return [step for i, step in enumerate(steps) if i == 0 or step != steps[i - 1]]


def reads_before_a_wait(steps: list[str]) -> bool:
    """A branch may wait for itself: what stands behind the stores of another one is ahead of its wait."""
    loaded = False
    for step in steps:
        if step == "wait" and loaded:
            return True
        loaded = step == "load" or (loaded and step not in ("store", "wait"))
    return False


def complaints(launch: Launch, steps: list[str]) -> list[str]:
    """Where the code does not do what the table says."""
    wait = steps.index("wait") if "wait" in steps else None
    found = []
    if (wait is not None) != (launch.waits != "launch"):
        return [f"waits: {launch.waits}, but {steps}"]
    if ("trigger" in steps) != (launch.triggers != "never"):
        found.append(f"triggers: {launch.triggers}, but {steps}")
    if ("fence" in steps) != launch.fence:
        found.append(f"fence: {launch.fence}, but {steps}")
    if launch.waits == "first" and wait is not None:
        if "store" in steps[:wait]:
            found.append(f"stores before it waits: {steps}")
        if reads_before_a_wait(steps) != bool(launch.reads_early or launch.reads_of_ahead):
            found.append(f"reads early {launch.reads_early}, but {steps}")
        if (launch.triggers == "start" and "trigger" in steps[wait:]) or (
            launch.triggers == "wait" and steps[wait + 1] != "trigger"
        ):
            found.append(f"triggers: {launch.triggers}, but {steps}")
    if "fence" in steps and launch.waits != "last" and "store" in steps[steps.index("fence") :]:
        found.append(f"stores behind its fence: {steps}")
    return found


@pytest.mark.parametrize(
    ("steps", "launch", "words"),
    [
        (["load", "wait", "store"], Launch("a", ()), "reads early"),
        (["wait", "load", "store", "load", "wait", "store"], Launch("a", ()), "reads early"),
        (["store", "wait"], Launch("a", ()), "stores before"),
        (["wait", "trigger", "store"], Launch("a", ()), "triggers: never"),
        (["wait", "trigger", "store"], Launch("a", (), "start"), "triggers: start"),
        (["wait", "load", "trigger"], Launch("a", (), "wait"), "triggers: wait"),
        (["wait", "store"], Launch("a", (), fence=True), "fence: True"),
        (["wait", "fence", "store"], Launch("a", (), fence=True), "behind its fence"),
        (["load", "store"], Launch("a", ()), "waits: first"),
        (["wait", "store"], Launch("a", (), waits="launch"), "waits: launch"),
    ],
)
def test_a_false_row_is_found(steps: list[str], launch: Launch, words: str) -> None:
    assert [text for text in complaints(launch, steps) if words in text]


def row(op: str, kernel: str, case: str = "") -> Launch:
    if not op:
        return Launch(kernel, (), waits="launch")
    found = [
        launch
        for launch in STREAM_ORDER[op]
        if launch.kernel.endswith(f":{kernel}") and launch.case.endswith(case)
    ]
    assert len(found) == 1, (op, kernel, case)
    return found[0]


def case_of(op: str, arguments: dict[str, Any]) -> str:
    if op == "rope_write_latent":
        return "query tokens" if arguments["ARE_QUERY_TOKENS"] else "other tokens"
    if op in QUERY_TOKEN_WRITES:
        return f"are_query_tokens={bool(arguments['ARE_QUERY_TOKENS'])}"
    if op == "causal_conv" and "SHORT" in arguments:
        return "of one tile" if arguments["SHORT"] else "of several tiles"
    if op == "linear_attention":
        return "long rows" if "chunks" in arguments else ""
    if op == "paged_attention" and hasattr(arguments["TILING"], "longest"):
        return "decode half" if arguments["TILING"].longest else "triton, decode"
    if op == "mla_attention" and "top_k" in arguments:
        return "indices, in parts" if arguments["SIZES"].split else "indices, one part per token"
    if op == "mla_attention" and "SIZES" in arguments:
        return "parts of the context" if arguments["SIZES"].split else "one part per request"
    return ""


@pytest.fixture(scope="module")
def triton_launches() -> list[tuple[str, Any]]:
    """``(op, recorded launch)`` of every Triton kernel, in each of its cases; of those of no op with ""."""
    pytest.importorskip("triton", reason="triton is not installed")
    import launched
    import torch
    from hanging_batches import SEEN, Case, make_hanging_batch
    from op_inputs.experts import make_experts_inputs
    from op_inputs.latent import as_fp8, make_latent_batch, run_mla_attention
    from op_inputs.layers import (
        make_embedding_inputs,
        make_gate_heads_inputs,
        make_gate_inputs,
        make_norm_inputs,
    )
    from op_inputs.opcheck import opcheck_cases
    from op_inputs.sampling import make_accept_inputs, make_finish_inputs, make_sampling_inputs
    from op_inputs.state import STATE_BATCHES, Rows, make_conv_inputs
    from op_inputs.state import make_linear_inputs as make_state_inputs

    from torchpaged.custom_ops import BACKEND_OPS
    from torchpaged.custom_ops.block_ops.packing import BlockPacking
    from torchpaged.custom_ops.state.call import LinearAttentionCall
    from torchpaged.custom_ops.state.triton.library_rows import gather_states, library_rows, scatter_states
    from torchpaged.testing import BATCH_SPECS, run_paged_attention

    ops = BACKEND_OPS["triton"]
    found: list[tuple[str, Any]] = []

    def record(op: str, *args: Any, **kwargs: Any) -> None:
        with launched.recorded() as launches:
            getattr(ops, op)(*args, **kwargs)
        found.extend((op, launch) for launch in launches)

    cases = opcheck_cases(dtype=torch.bfloat16).values()
    alone = (
        "merge_attn_states",
        "copy_blocks",
        "advance_step",
        "delta_gates",
        "gated_rms_norm",
        "route_experts",
        "apply_experts",
    )
    for op in (
        "write_kv",
        "rope_write_kv",
        "rope_write_latent",
        "up_project_values",
        "write_index_keys",
        "index_logits",
        *alone,
    ):
        _, args, kwargs = next(case for case in cases if case[0] == op)
        for flags in (
            [{"are_query_tokens": value} for value in (False, True)] if op in QUERY_TOKEN_WRITES else [{}]
        ):
            record(op, *args, **{**kwargs, **flags})
    one_token = make_experts_inputs(num_tokens=1, shared=24, residual=True, dtype=torch.bfloat16)
    record("apply_experts", **one_token)
    for op, args, kwargs in cases:  # prompts, and single tokens
        if op == "linear_attention":
            record(op, *args, **kwargs)
    for batch in ("decode", "verify", "chunks"):
        record("causal_conv", **make_conv_inputs(STATE_BATCHES[batch], dtype=torch.bfloat16))
    with launched.recorded() as launches:  # the others are those of its parts
        ops.mamba2_step(**next(case[2] for case in cases if case[0] == "mamba2_step"))
    found.append(("mamba2_step", launches[-1]))
    for by_key in (False, True):
        sizes = {"key_dim": 128, "value_dim": 48, "by_key": by_key, "dtype": torch.bfloat16}
        record("linear_attention", **make_state_inputs(STATE_BATCHES["chunks"], **sizes))
    record("linear_attention", **make_state_inputs(Rows(((0, 2048),)), **sizes | {"value_dim": 64}))
    sampled = {"temperature": 0.7, "top_k": 5, "top_p": 0.9}
    record("embedding", **make_embedding_inputs(width=576, dtype=torch.bfloat16))
    record("rms_norm", **make_norm_inputs(dtype=torch.bfloat16))
    record("act_and_mul", **make_gate_inputs(dtype=torch.bfloat16))
    record("gate_heads", **make_gate_heads_inputs(dtype=torch.bfloat16))
    record("accept_tokens", **make_accept_inputs())
    record("sample_tokens", **make_sampling_inputs([sampled, {}], vocab_size=600))
    record("finish_step", **make_finish_inputs([sampled, {}], vocab_size=600))
    for columns in (5, 64):  # few keys in one part, many in several
        latents = make_latent_batch(
            BATCH_SPECS["decode_one"], dtype=torch.bfloat16, extra_columns=columns - 1
        )
        assert latents.block_table.shape[1] == columns
        positions = torch.zeros(len(latents.q), 16 * columns, dtype=torch.int32)
        for options in ({}, {"indices": positions}):
            with launched.recorded() as launches:
                run_mla_attention(ops, latents, **options)
            found.extend(("mla_attention", launch) for launch in launches)
    kv_c, k_pe = latents.q[0].split((32, 16), dim=-1)
    for pool in (latents.k_cache, as_fp8(latents).k_cache):
        record("write_latent", kv_c, k_pe, pool, torch.arange(16, 20))
    decode = Case(8, 2, 64, (1000, 33), (1, 1))
    for case in (decode, SEEN["fp8_of_48"]):  # which test_barriers.py compiles, too
        with launched.recorded() as launches:
            run_paged_attention(ops, make_hanging_batch(case), **case.options)
        found.extend(("paged_attention", launch) for launch in launches)
    sizes = {"key_dim": 128, "value_dim": 128, "dtype": torch.bfloat16}
    call = LinearAttentionCall(**make_state_inputs(STATE_BATCHES["chunks"], **sizes))
    pools, moved = torch.zeros(2, 4, 64, dtype=torch.uint8), torch.zeros(2, 128, dtype=torch.uint8)
    with launched.recorded() as launches:
        rows = library_rows(call)
        scatter_states(gather_states(rows.reads, call.state), rows.writes, call.state)
        BlockPacking(list(pools), [0, 64]).run(moved, torch.tensor([1, 3]), 0, unpack=False)
    found.extend(("", launch) for launch in launches)
    return found


def test_triton_ptx(triton_launches: list[tuple[str, Any]]) -> None:
    """The order in the code that the compiler made, kernel by kernel, as launched for a Hopper GPU."""
    import launched

    wrong, seen = [], set()
    for op, launch in triton_launches:
        expected = row(op, launch.name, case_of(op, launch.arguments))
        if (op, expected) in seen:
            continue
        seen.add((op, expected))
        steps = order(launched.compile_launch(launch).asm["ptx"])
        wrong += [f"{op}, {launch.name}, {expected.case}: {text}" for text in complaints(expected, steps)]
    assert not wrong, "\n".join(wrong)
    assert {launch.name for _, launch in triton_launches} == {
        name for name in functions_of_the_package() if name.endswith("_kernel")
    }
    missed = [
        (op, launch.kernel, launch.case)
        for op, launch in LAUNCHES
        if ".py:" in launch.kernel and (op, launch) not in seen
    ]
    assert not missed, missed


@needs_nvcc
@pytest.mark.parametrize(
    ("tokens", "rows", "case"),
    [(8, 4096, "1 to 8 tokens"), (16, 4096, "no wgmma"), (16, 3072, "share k"), (64, 4096, "share k")],
)
def test_linear_ptx(tmp_path: Path, tokens: int, rows: int, case: str) -> None:
    import torch

    from torchpaged.custom_ops.layers.cuda.linear_shape import LinearSpec, linear_config, linear_shape

    shape = linear_shape(tokens, rows, 4096, 132, True, True, 228 << 10, 227 << 10)
    spec = LinearSpec(torch.bfloat16, tokens, rows, 4096, 4096, "none", False, False, False, True, True)
    config = linear_config(spec, shape, early=True)
    name = "linear_wide" if shape.wide else "linear"
    expected = row("linear", name, case)
    ptx, _ = compiled(tmp_path, source_of(expected.kernel).name, config, "ptx")
    steps = order(ptx.replace("cp.async.bulk.tensor.2d.shared::cluster.global", "ld.global"))
    assert not complaints(expected, steps)


@needs_nvcc
@pytest.mark.parametrize(("name", "config"), [("linear_large", "large_config"), ("linear_sum", "sum_config")])
def test_linear_large_ptx(tmp_path: Path, name: str, config: str) -> None:
    import torch

    from torchpaged.custom_ops.layers.cuda import linear_large
    from torchpaged.custom_ops.layers.cuda.linear_shape import LinearSpec

    spec = LinearSpec(torch.bfloat16, 128, 4096, 8192, 8192, "none", False, True, True, True, True)
    values = getattr(linear_large, config)(spec, linear_large.LargeShape(80, 2, 1, 4), early=True)
    ptx, _ = compiled(tmp_path, f"{name}.cu", values, "ptx")
    steps = order(ptx.replace("cp.async.bulk.tensor.2d.shared::cluster.global", "ld.global"))
    assert not complaints(row("linear", name), steps)


@needs_nvcc
@pytest.mark.parametrize("op", ["delta_step", "mamba2_step"])
@pytest.mark.parametrize("new_step", [False, True])
def test_steps_of_states_ptx(tmp_path: Path, op: str, new_step: bool) -> None:
    """A state's 16 bytes are loaded on the right side of the wait."""
    from torchpaged.custom_ops.state.cuda.delta_step import StepSpec
    from torchpaged.custom_ops.state.cuda.mamba2_step import Mamba2StepSpec

    sizes = {
        "delta_step": StepSpec(128, 64, 16, 1, 2, 16, *(False,) * 3, 4, False, True, *(False,) * 3, new_step),
        "mamba2_step": Mamba2StepSpec(
            128, 64, 48, 48, 1, 4, False, True, *(False,) * 3, gated=True, new_step=new_step, beside=False
        ),
    }
    ptx, _ = compiled(tmp_path, f"{op}.cu", sizes[op].config(), "ptx")
    assert not complaints(row(op, op, "a new step" if new_step else "cuda, on Hopper"), order(ptx))
    loads = [at.start() for at in re.finditer(r"ld\.global\.cg\.v4\.u32", ptx)]
    wait = ptx.index("griddepcontrol.wait")
    assert {load < wait for load in loads} == {new_step}


@needs_nvcc
@pytest.mark.parametrize("case", ["cuda, on Hopper", "beside the attention in front of it"])
def test_mamba2_step_ptx(tmp_path: Path, case: str) -> None:
    from torchpaged.custom_ops.state.cuda.mamba2_step import Mamba2StepSpec

    expected = row("mamba2_step", "mamba2_step", case)
    beside = expected.waits == "last"
    flags = {"half": False, "state_float": True, "gated": True, "new_step": False, "beside": beside}
    of_float = dict.fromkeys(("a_log_float", "dt_bias_float", "skip_float"), False)
    spec = Mamba2StepSpec(256, 64, 48, 48, 1, 4, **flags, **of_float, min_ctas=2)
    ptx, _ = compiled(tmp_path, "mamba2_step.cu", spec.config(), "ptx")
    steps = order(ptx)
    assert not complaints(expected, steps)
    assert ("store" in steps[: steps.index("wait")]) == beside
    assert ("ld.acquire.gpu" in ptx) == beside


@needs_nvcc
@pytest.mark.parametrize("name", ["experts_gate_up", "experts_down"])
def test_few_experts_ptx(tmp_path: Path, name: str) -> None:
    from torchpaged.custom_ops.experts.cuda.few_experts import ExpertsSpec

    expected = row("apply_experts", name)
    config = ExpertsSpec(1024, 128, 256, 4, 1, False, True).config()
    ptx, _ = compiled(tmp_path, source_of(expected.kernel).name, config, "ptx")
    of_kernel = ptx[ptx.index(f".entry {name}(") :].split(".entry ")[1]
    assert not complaints(expected, order(of_kernel))
