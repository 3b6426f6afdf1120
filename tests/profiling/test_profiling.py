"""NVTX ranges really arrive: a small NVTX tool, compiled here and injected into a process that runs the
engine, writes down what it sees."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from torchpaged import profiling
from torchpaged.custom_ops.errors import ArgumentError

ROOT = Path(__file__).parents[2]

#: An NVTX v3 tool. The structs and ids are those of nvtxTypes.h and nvToolsExt.h (stable ABI), so that no
#: toolkit is needed.
TOOL = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct { uint16_t version, size; uint32_t category; int32_t color_type; uint32_t color; int32_t payload_type, reserved0;
                 union { int64_t i64; double f64; } payload; int32_t message_type; union { const char *ascii; void *handle; } message; } event_t;
typedef struct { char *name; } string_t;  /* handles of domains and of registered strings are ours to choose */
typedef void (***table_t)(void);
typedef struct { size_t struct_size; int (*get_table)(int module, table_t *table, unsigned *size); } callbacks_t;
enum { EXPORT_CALLBACKS = 1, MODULE_CORE2 = 5, RANGE_PUSH_EX = 4, RANGE_POP = 5, REGISTER_STRING_A = 10, DOMAIN_CREATE_A = 12 };
enum { MESSAGE_ASCII = 1, MESSAGE_REGISTERED = 3, PAYLOAD_INT64 = 2 };

static FILE *out;

static string_t *keep(const char *text) {
    string_t *kept = malloc(sizeof *kept);
    kept->name = malloc(1024);
    snprintf(kept->name, 1024, "%s", text);
    return kept;
}
static const char *name_of(void *domain) { return domain ? ((string_t *)domain)->name : "(default)"; }
static void *domain_create(const char *name) { fprintf(out, "domain|%s\n", name); return keep(name); }
static void *register_string(void *domain, const char *text) { (void)domain; return keep(text); }
static int push(void *domain, const event_t *event) {
    const char *text = event->message_type == MESSAGE_REGISTERED ? ((string_t *)event->message.handle)->name
                     : event->message_type == MESSAGE_ASCII ? event->message.ascii : "(no text)";
    fprintf(out, "push|%s|%s|", name_of(domain), text);
    if (event->payload_type == PAYLOAD_INT64) fprintf(out, "%lld", (long long)event->payload.i64);
    fputc('\n', out);
    return 0;
}
static int pop(void *domain) { fprintf(out, "pop|%s\n", name_of(domain)); return 0; }

int InitializeInjectionNvtx2(const void *(*get_export_table)(uint32_t)) {
    const callbacks_t *callbacks = get_export_table(EXPORT_CALLBACKS);
    const char *path = getenv("NVTX_TEST_LOG");
    table_t table;
    unsigned size;
    if (!callbacks || !path || !callbacks->get_table(MODULE_CORE2, &table, &size) || size <= DOMAIN_CREATE_A) return 0;
    if (!(out = fopen(path, "w"))) return 0;
    setvbuf(out, NULL, _IOLBF, 0);
    *table[RANGE_PUSH_EX] = (void (*)(void))push;
    *table[RANGE_POP] = (void (*)(void))pop;
    *table[REGISTER_STRING_A] = (void (*)(void))register_string;
    *table[DOMAIN_CREATE_A] = (void (*)(void))domain_create;
    return 1;
}
#ifdef REFUSES_EXTENSIONS  /* as Nsight Systems 2023.4 and 2024.2 do: nvtxDomainIsEnabled returns 0 */
int InitializeInjectionNvtxExtension(void *module) { (void)module; return 0; }
#endif
"""  # noqa: E501

#: The engine on two tiny layers: a few seconds, most of it imports.
ENGINE = """
import torch, transformers
from torchpaged.engine import Generator, SamplingParams
config = transformers.LlamaConfig(
    vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    max_position_embeddings=64, eos_token_id=None, pad_token_id=0, bos_token_id=1)
generator = Generator(transformers.LlamaForCausalLM(config).eval(), max_batch_size=2, buckets=[2], prefill_chunk_size=3)
params = SamplingParams(max_new_tokens=3)
"""  # noqa: E501
GENERATE = "generator.generate([[5, 6, 7], [9, 8]], params)"

Node = tuple[str, str, list["Node"]]


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHPAGED_NVTX", "NVTX_"))}
    environment = {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tool(tmp_path_factory)


@pytest.fixture(scope="module")
def tool_that_refuses_extensions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tool(tmp_path_factory, "-DREFUSES_EXTENSIONS")


def build_tool(tmp_path_factory: pytest.TempPathFactory, *options: str) -> Path:
    pytest.importorskip("nvtx", reason="nvtx is not installed (torchpaged[profiling])")
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("no C compiler `cc` on a Linux, to build the NVTX tool with")
    folder = tmp_path_factory.mktemp("nvtx")
    (folder / "tool.c").write_text(TOOL)
    subprocess.run(
        [compiler, *options, "-Wall", "-shared", "-fPIC", "-o", folder / "tool.so", folder / "tool.c"],
        check=True,
    )
    return folder / "tool.so"


def record(tool: Path, code: str, **variables: str) -> list[Node]:
    """The ranges of domain torchpaged as a tree of (message, number, children); fails if a pop does
    not match."""
    log = tool.with_name("log.txt")
    log.unlink(missing_ok=True)
    done = run(code, NVTX_INJECTION64_PATH=str(tool), NVTX_TEST_LOG=str(log), **variables)
    assert done.returncode == 0, done.stderr
    root: Node = ("", "", [])
    stack = [root]
    lines = [line.split("|") for line in log.read_text().splitlines()]
    assert ["domain", "torchpaged"] in lines
    for kind, domain, *rest in lines:
        if domain != "torchpaged" or kind == "domain":
            continue
        if kind == "push":
            node: Node = (rest[0], rest[1], [])
            stack[-1][2].append(node)
            stack.append(node)
        else:
            assert len(stack) > 1, "a pop without a push"
            stack.pop()
    assert stack == [root], "a push without a pop"
    return root[2]


def shape(nodes: list[Node]) -> list[object]:
    """Messages only: a string, or (string, children)."""
    return [(text, shape(inner)) if inner else text for text, _, inner in nodes]


LAYERS: list[object] = ["attention layer=0", "attention layer=1"]


def only(nodes: list[Node], *words: str) -> list[object]:
    """The tree without the ranges whose first word is not one of ``words``; what was inside them moves up."""
    kept: list[object] = []
    for text, _, inner in nodes:
        below = only(inner, *words)
        kept += ([(text, below)] if below else [text]) if text.split()[0] in words else below
    return kept


COMPILED = """
paged = generator.model
from torchpaged.metadata import AttentionMetadata
metadata = AttentionMetadata.from_lists([1], [1], [[1]], block_size=16, num_blocks=paged.kv_cache.num_blocks)
step = torch.compile(lambda ids, metadata: paged(ids, metadata), fullgraph=True, backend="eager")
with torch.inference_mode():
    for _ in range(2):
        with profiling.range("compiled"):
            step(torch.tensor([5]), metadata)
    with profiling.range("plain"):
        paged(torch.tensor([5]), metadata)
"""
PARTS = {
    "engine": ENGINE + GENERATE,
    # a capture that does not run Python again, as a CUDA graph does not
    "tape": ENGINE.replace("buckets=[2]", "buckets=[2], capture=TapeCapture(), compile=False") + GENERATE,
    "reference": ENGINE.replace("max_batch_size=2", 'max_batch_size=2, backend="reference"') + COMPILED,
    "native": ENGINE + COMPILED,
}


@pytest.fixture(scope="module")
def parts(tool: Path) -> dict[str, list[Node]]:
    """What each of `PARTS` pushes; one process, since imports are most of its time."""
    code = "from torchpaged import profiling\nfrom torchpaged.graphs import TapeCapture\n"
    for name, text in PARTS.items():
        code += f"with profiling.range({name!r}):\n{textwrap.indent(text, '    ')}\n"
    return {name: inner for name, _, inner in record(tool, code, TORCHPAGED_NVTX="1")}


def test_ranges_of_the_engine_arrive_nested(parts: dict[str, list[Node]]) -> None:
    """Prompts of 3 and 2 tokens in chunks of 3, 3 new tokens each, at most 2 rows, one bucket of 2."""
    nodes = parts["engine"]
    steps = [node for node in nodes if node[0] == "step"]
    assert [number for _, number, _ in steps] == [str(i) for i in range(len(steps))]
    # attention outside a step: the model's layers are tried at the start
    assert {text for text, _, _ in nodes} == {"step", *LAYERS}
    assert all(inner[0][0].startswith("admission waiting=") for _, _, inner in steps)
    assert only(nodes, "prefill") == ["prefill batch=1 tokens=3", "prefill batch=2 tokens=3 decodes=1"]
    assert only(steps, "admission")[0] == "admission waiting=2"
    captured = ("capture padded=2", LAYERS * 2)  # once to warm up
    # after the attention of the two prompts' passes, the second of which has the first one's decode
    first, *later = only(steps, "decode", "capture", "replay", "attention")[4:]
    # on a CPU a replay runs the model again
    assert first == ("decode batch=2 tokens=2", [captured, ("replay batch=2 padded=2", LAYERS)])
    assert ("decode batch=2 tokens=2", [("replay batch=2 padded=2", LAYERS)]) in later
    assert all(node in LAYERS or node[0].startswith("decode") for node in later)


def test_attention_ranges_stand_in_the_capture_and_not_in_the_replay(parts: dict[str, list[Node]]) -> None:
    steps = [node for node in parts["tape"] if node[0] == "step"]
    found = only(steps, "prefill", "capture", "replay", "attention")
    assert found[:4] == [
        ("prefill batch=1 tokens=3", LAYERS),
        ("prefill batch=2 tokens=3 decodes=1", LAYERS),
        ("capture padded=2", LAYERS * 2),
        "replay batch=2 padded=2",
    ]
    assert all(isinstance(node, str) or "replay" not in node[0] for node in found)


def test_compiled_code_keeps_the_attention_ranges(parts: dict[str, list[Node]]) -> None:
    """It is traced as one graph with NVTX on; the ranges stand inside the op, whose kernel is written
    in Python."""
    seen = shape(parts["reference"][2:])
    assert seen == [("compiled", LAYERS), ("compiled", LAYERS), ("plain", LAYERS)]


def test_compiled_code_without_python_kernels_has_no_ranges(
    parts: dict[str, list[Node]], native: None
) -> None:
    assert shape(parts["native"][2:]) == ["compiled", "compiled", ("plain", LAYERS)]


def test_ranges_only_inside_enabled(tool: Path) -> None:
    """Before and after the block nothing is pushed; an exception still pops what was open. Of blocks that
    overlap, as those of threads do, the first one to end leaves ranges on, and the last one switches them
    off."""
    code = """
from torchpaged import profiling
from torchpaged.profiling.ranges import NOTHING
with profiling.range("before"):
    pass
with profiling.enabled():
    with profiling.range("eager", 7, batch=3, kind="x"), profiling.enabled(), profiling.range("inner"):
        pass
    try:
        with profiling.range("failed"):
            raise KeyError
    except KeyError:
        pass
    outlives = profiling.range("outlives")
    outlives.__enter__()
assert profiling.range("after") is NOTHING
outlives.__exit__(None, None, None)
"""
    overlapping = """
first, second = profiling.enabled(), profiling.enabled()
first.__enter__()
second.__enter__()
first.__exit__(None, None, None)
with profiling.range("still"):
    pass
second.__exit__(None, None, None)
assert profiling.range("after") is NOTHING
"""
    assert record(tool, code + overlapping) == [
        ("eager batch=3 kind=x", "7", [("inner", "", [])]),
        ("failed", "", []),
        ("outlives", "", []),
        ("still", "", []),
    ]


@pytest.mark.slow
def test_a_tool_that_refuses_extensions_gets_the_ranges(tool_that_refuses_extensions: Path) -> None:
    """The nvtx package takes such a tool for one that wants no ranges; under nsys 2023.4 none arrived."""
    code = """
import nvtx
from torchpaged import profiling
assert type(nvtx.get_domain("another")).__name__ == "DummyDomain"
with profiling.enabled():
    with profiling.range("outer", 7), profiling.enabled(), profiling.range("inner"):
        pass
with profiling.enabled(), profiling.range("again"):
    pass
"""
    nodes = record(tool_that_refuses_extensions, code)
    assert nodes == [("outer", "7", [("inner", "", [])]), ("again", "", [])]


def test_without_nvtx() -> None:
    """Off, also while the engine runs, every range is the same object. A trace has the names of NVTX, and is
    written when its block fails. Neither imports nvtx."""
    off = """
import json, sys
from torchpaged import profiling
from torchpaged.profiling.ranges import NOTHING
assert profiling.range("a") is profiling.range("b", 1, batch=2) is NOTHING
with profiling.range("a"):
    pass
generator.generate([[5, 6, 7]], params)
"""
    traced = """
try:
    with profiling.trace(PATH):
        generator.submit([5, 6, 7], params)
        generator.step()
        generator.step()
        with profiling.range("mine", 7, batch=3):
            raise KeyError("midway")
except KeyError:
    pass
assert profiling.range("a") is NOTHING and "nvtx" not in sys.modules
spans = [e for e in json.load(open(PATH))["traceEvents"] if e.get("cat") == "user_annotation"]
def inside(inner, outer):
    return any(o["ts"] <= i["ts"] and i["ts"] + i["dur"] <= o["ts"] + o["dur"]
               for i in spans if i["name"] == inner for o in spans if o["name"] == outer)
assert inside("prefill batch=1 tokens=3", "step") and inside("attention layer=1", "prefill batch=1 tokens=3")
assert inside("attention layer=0", "capture padded=2") and inside("replay batch=1 padded=2", "step")
assert any(e["name"] == "mine batch=3" for e in spans), "what failed is in the trace too"
"""
    with tempfile.TemporaryDirectory() as folder:
        done = run(ENGINE + off + ENGINE + traced.replace("PATH", repr(f"{folder}/out.json")))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_both_sinks_at_once(tool: Path, tmp_path: Path) -> None:
    code = f"""
import json
from torchpaged import profiling
with profiling.enabled(), profiling.trace({str(tmp_path / "out.json.gz")!r}), profiling.range("both", batch=1):
    pass
"""  # noqa: E501
    assert shape(record(tool, code)) == ["both batch=1"]
    events = json.loads(gzip.decompress((tmp_path / "out.json.gz").read_bytes()))["traceEvents"]
    assert any(event["name"] == "both batch=1" for event in events)


def test_a_trace_that_can_not_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "out.json", tmp_path):
        with pytest.raises(ArgumentError, match="path: expected a file"), profiling.trace(path):
            pytest.fail("the block ran")


@pytest.mark.slow_cases(but=("variable",))
@pytest.mark.parametrize(
    ("variables", "code", "message"),
    [
        (
            {"TORCHPAGED_NVTX": "1"},
            "import torchpaged.engine",
            r"TORCHPAGED_NVTX=1: .*pip install 'torchpaged\[profiling\]'",
        ),
        (
            {},
            "from torchpaged.profiling import enabled\nwith enabled(): pass",
            r"enabled\(\): .*pip install 'torchpaged\[profiling\]'",
        ),
        ({"TORCHPAGED_NVTX": "1", "NVTX_DISABLE": "1"}, "import torchpaged.engine", "NVTX_DISABLE is set"),
        (
            {"TORCHPAGED_NVTX": "yes"},
            "import torchpaged.engine",
            "TORCHPAGED_NVTX: expected 0 or 1, got 'yes'",
        ),
    ],
    ids=["variable", "block", "switched-off", "nonsense"],
)
def test_asked_for_and_not_there_is_an_error(variables: dict[str, str], code: str, message: str) -> None:
    done = run("import sys; sys.modules['nvtx'] = None\n" + code, **variables)
    assert done.returncode == 1, done.stderr
    assert re.search(message, done.stderr.strip().splitlines()[-1]), done.stderr
