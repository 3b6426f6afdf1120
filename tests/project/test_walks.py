"""docs/walks.md tells a reader which functions a call runs through: they exist, they run in that order, and
no other file of ours runs."""

import ast
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
#: Not all below it: an environment may stand there, too.
ROOMS = ("custom_ops", "graphs", "torchpaged")
FILE = r"`((?:torchpaged|custom_ops|graphs)/[\w/]+\.(?:py|cuh?))`"
SIZES = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 64}


def sections() -> dict[str, str]:
    """The page's walks by their headings."""
    _, *parts = re.split(r"^## ", (ROOT / "docs" / "walks.md").read_text(), flags=re.M)
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in parts}


WALKS = sections()


def steps(walk: str) -> list[tuple[str, str]]:
    """File and function of each numbered line."""
    lines = re.findall(r"^(\d+)\. ", walk, re.M)
    assert [int(number) for number in lines] == list(range(1, len(lines) + 1))
    found = re.findall(rf"^\d+\. {FILE} `([\w.]+)`", walk, re.M)
    assert len(found) == len(lines), "a line without a file and a function"
    return found


def defined(path: Path) -> set[str]:
    """Functions and classes of a module, methods with their class."""

    def names(node: ast.AST, inside: str) -> set[str]:
        result = set()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                result |= {inside + child.name} | names(child, f"{inside}{child.name}.")
        return result

    return names(ast.parse(path.read_text()), "")


@pytest.mark.parametrize("name", WALKS)
def test_what_is_named_exists(name: str) -> None:
    for file, function in steps(WALKS[name]):
        path = ROOT / file
        if path.suffix == ".py":
            assert function in defined(path), f"{file} {function}"
        else:
            assert re.search(rf"\b{function}\(", path.read_text()), f"{file} {function}"
    assert all((ROOT / file).exists() for file in re.findall(FILE, WALKS[name]))


def walked(call: Callable[[], Any]) -> dict[tuple[str, str], None]:
    """Files and functions of ours that run in ``call``, in the order of their first calls."""
    codes: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes[frame.f_code] = None

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    found: dict[tuple[str, str], None] = {}
    for code in codes:
        path = os.path.realpath(code.co_filename)
        ours = path.startswith(tuple(f"{ROOT}{os.sep}{room}{os.sep}" for room in ROOMS))
        if ours and os.path.exists(path):
            found[os.path.relpath(path, ROOT), code.co_qualname.partition(".<locals>")[0]] = None
    return found


def compare(name: str, ran: dict[tuple[str, str], None], *kernels: str) -> None:
    """``kernels``: files whose functions don't run in Python."""
    walk, order = WALKS[name], list(ran)
    way = [step for step in steps(walk) if step[0] not in kernels]
    assert set(way) <= set(order), set(way) - set(order)
    first: dict[tuple[str, str], None] = dict.fromkeys(way)  # what the way comes back to was met before
    assert list(first) == sorted(first, key=order.index)
    named = set(re.findall(FILE, walk))
    assert named == {file for file, _ in ran} | set(kernels)


def ops_left_out(ran: dict[tuple[str, str], None]) -> dict[tuple[str, str], None]:
    """An op's own files have a walk of their own, and are others where a backend is."""
    return {place: None for place in ran if not place[0].startswith("custom_ops")}


def test_a_decode_step_of_a_huggingface_model(make_llama: Callable[..., Any]) -> None:
    from torchpaged.hf import PagedCache

    model = make_llama(**SIZES)
    model.set_attn_implementation("torchpaged")
    cache, token = PagedCache(model.config, 2, 32), torch.tensor([[5], [6]])
    with torch.inference_mode():
        for _ in range(3):
            model(token, past_key_values=cache)
        ran = walked(lambda: model(token, past_key_values=cache))
    compare("A decode step of a HuggingFace model", ops_left_out(ran))


def test_a_step_of_the_engine(make_llama: Callable[..., Any]) -> None:
    from torchpaged.engine import Generator, SamplingParams

    generator = Generator(make_llama(**SIZES), max_batch_size=2, max_seq_len=64)
    generator.submit([3, 4, 5], SamplingParams(max_new_tokens=40))
    for _ in range(4):
        generator.step()
    compare("A step of the engine", ops_left_out(walked(generator.step)))


def test_an_op_down_to_the_triton_kernel() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels are interpreted in this process")
    from launched import recorded
    from triton.runtime import JITFunction

    q, pool = torch.zeros(2, 4, 64).bfloat16(), torch.zeros(8, 16, 2, 64).bfloat16()
    table, lens = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), torch.tensor([20, 17], dtype=torch.int32)
    starts, out = torch.tensor([0, 1, 2], dtype=torch.int32), torch.empty(2, 4, 64).bfloat16()
    attend = torch.ops.torchpaged.paged_attention.triton

    def call() -> None:
        attend(q, pool, pool.clone(), table, lens, starts, out, None, max_query_len=1, scale=0.125)

    with recorded() as launches:
        call()
        ran = walked(call)
    used = sys.modules[launches[-1].kernel.fn.__module__]
    ours = [x.fn for x in vars(used).values() if isinstance(x, JITFunction)]
    files = {os.path.relpath(os.path.realpath(x.__code__.co_filename), ROOT) for x in ours}
    own = {file for file in files if file.startswith("custom_ops/attention/")}
    compare("An op, down to the Triton kernel", ran, *own)
