"""An option of attention travels in the record of its call: where options are spelled out, and how many files
name one of them. A new place fails here: pass the record on, or `torchpaged.functional.arguments` makes it.

What a new option touches, a toy tensor that scales the output, say: ``schema.py`` and ``call.py`` of
``custom_ops/attention`` (declared), ``check.py`` (what it must be), ``reference.py`` (what it means) and each
kernel that computes with it; ``backends/spec.py`` (`FEATURES`, `GIVEN`: backends without it refuse it),
``functional/attention.py`` and, if modules have it, ``attention.py``.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OPTIONS = {
    "alibi_slopes",
    "sinks",
    "logits_soft_cap",
    "chunk_size",
    "tree_mask",
    "k_scale",
    "v_scale",
    "window_size",
    "window_left",
    "window_right",
    "causal",
}
#: Python files with a signature, a class, a call or a dictionary that names five options or more, and why.
SPELLED_OUT = {
    "custom_ops/attention/call.py": "the record, and the key of compiled kernels",
    "custom_ops/attention/triton/attend.py": "the constants of Triton kernels",
    "custom_ops/attention/triton/decode.py": "one makes them",
    "custom_ops/attention/triton/prefill.py": "one makes them",
    "torchpaged/functional/attention.py": "the public function",
    "torchpaged/attention.py": "the module",
    "torchpaged/hf/layer.py": "HuggingFace's call",
    "torchpaged/hf/chosen_backend.py": "what that call asks of a backend",
    "torchpaged/compat/flash_attn.py": "FlashAttention's words",
    "torchpaged/compat/kvcache.py": "FlashAttention's words over a cache",
    "torchpaged/compat/vllm_layer.py": "vLLM's words",
    "torchpaged/testing/conformance.py": "what a batch of the suite asks of a backend",
}


def _python_files() -> list[Path]:
    folders = (ROOT / "torchpaged", ROOT / "custom_ops", ROOT / "graphs")
    links = {ROOT / "torchpaged" / "custom_ops", ROOT / "torchpaged" / "graphs"}
    return [path for folder in folders for path in folder.rglob("*.py") if not links & set(path.parents)]


def _names(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef):
        return {one.arg for one in (*node.args.args, *node.args.kwonlyargs)}
    if isinstance(node, ast.Call):
        return {one.arg for one in node.keywords if one.arg is not None}
    if isinstance(node, ast.ClassDef):
        fields = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
        return {field.id for field in fields if isinstance(field, ast.Name)}
    if isinstance(node, ast.Dict):
        return {
            key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
        }
    return set()


def _spells_out(source: str) -> bool:
    return any(len(_names(node) & OPTIONS) >= 5 for node in ast.walk(ast.parse(source)))


def test_options_are_spelled_out_where_words_meet() -> None:
    found = {str(path.relative_to(ROOT)) for path in _python_files() if _spells_out(path.read_text())}
    assert found == set(SPELLED_OUT)


@pytest.mark.parametrize(
    "source",
    [
        "f(causal=1, sinks=2, k_scale=3, v_scale=4, chunk_size=5)",
        "def f(causal, sinks, k_scale, *, v_scale, chunk_size): ...",
        "{'causal': 1, 'sinks': 2, 'k_scale': 3, 'v_scale': 4, 'chunk_size': 5}",
    ],
)
def test_a_new_place_would_be_seen(source: str) -> None:
    assert _spells_out(source)


def test_few_files_choose_by_an_option() -> None:
    """Of those that choose, declare and call: the features' names, the backends that have it, the record's
    makers. The batch's own files (metadata, graphs) carry it as data."""
    rooms = [
        ROOT / "torchpaged" / room for room in ("backends", "functional", "layers", "compat", "prefixes")
    ]
    naming = [path for room in rooms for path in room.rglob("*.py") if "tree_mask" in path.read_text()]
    assert len(naming) <= 13, sorted(str(path.relative_to(ROOT)) for path in naming)
