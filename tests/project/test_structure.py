"""An option of attention travels in the record of its call: where options are spelled out, and how many files
name one of them. A new place fails here: pass the record on, or `torchpaged.functional.arguments` makes it.

What a new option touches, tried with a toy: a tensor that scales the output, in the reference, refused by all
other backends, in compiled calls too. Seven files:

* ``custom_ops/attention``: ``schema.py`` and ``call.py`` (declared), ``check.py`` (what it must be, and which
  launchers take it), ``reference.py`` (what it means); ``cpu/paged_attention.cpp`` (the native kernel has the
  op's signature);
* ``torchpaged/backends/features.py`` (a row: backends without it refuse it, tables show it) and
  ``torchpaged/functional/attention.py`` (the public function).

A fact of pools, which the writes take as well, is a field of `KVScales` (``custom_ops/pools.py``): schemas,
records, checks and caches have that whole. Tried with a second factor of the keys: nine files, not eighteen.
These are ``pools.py``, both references, the signatures in C++ (``cpu/cache_ops.cpp``,
``cpu/paged_attention.cpp``), ``features.py``, the public functions (``functional/attention.py`` and
``cache_write.py``), and the pools of a layer (``torchpaged/cache/kv.py``).

Each kernel that computes with it is one or two more: ``triton/paged_attention.py`` hands it to the kernels,
and ``triton/attend.py`` uses it. Modules that have it name it in ``torchpaged/attention.py``; tables of pages
are made anew.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPTIONS = {
    "alibi_slopes",
    "sinks",
    "logits_soft_cap",
    "chunk_size",
    "tree_mask",
    "block_sparse",
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
    "custom_ops/attention/mask.py": "what hides keys by their positions",
    "torchpaged/functional/attention.py": "the public function",
    "torchpaged/attention.py": "the module",
    "torchpaged/hf/call.py": "transformers' words",
    "torchpaged/compat/arguments.py": "FlashAttention's words",
}
#: Python files that may name an option. block_sparse: ten are Triton's kernels;
#: output_scale: eight are of ``mla_attention``; v_scale: in between travels `KVScales`, these are kernels,
#: public functions and other libraries' words.
MOST_FILES = {"tree_mask": 14, "block_sparse": 23, "output_scale": 29, "alibi_slopes": 22, "v_scale": 30}
#: Other words that hold an option's name: Granite's, and that of a cache's argument.
OTHER_WORDS = ("block_sparse_moe", "kv_scales")


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


@pytest.mark.parametrize("option", MOST_FILES)
def test_few_files_name_an_option(option: str) -> None:
    """Declared, checked, meant, computed; the batch that has it as data, its export and its words; and those
    that say who takes it."""
    naming = []
    for path in _python_files():
        text = path.read_text()
        for word in OTHER_WORDS:
            text = text.replace(word, "")
        naming += [str(path.relative_to(ROOT))] * (option in text)
    assert len(naming) <= MOST_FILES[option], sorted(naming)
