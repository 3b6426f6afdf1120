"""Who imports whom: over every module no arrow up and no circle; kernels, references and backends keep apart.

Imports inside functions and under TYPE_CHECKING count like all others, except for the few that are listed.
"""

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
OPS = "torchpaged.custom_ops"
LIBRARY = "attention backend_module functional backends cache metadata custom_ops names version"
ENGINE = f"{LIBRARY} compile engine fuse graphs hf layers profiling"

#: Room -> the rooms that it may import besides itself. A room is a module or package of torchpaged; ""
#: is torchpaged/__init__.py.
_ROOMS: dict[str, str] = {
    "version": "",
    "custom_ops": "",
    "names": "custom_ops",
    "metadata": "custom_ops",
    "cache": "custom_ops metadata",
    "backends": "custom_ops metadata",
    "functional": "backends custom_ops metadata",
    "backend_module": "backends custom_ops prefixes",
    "attention": "backend_module backends cache custom_ops functional metadata prefixes",
    "layers": "attention backends cache custom_ops metadata",
    "prefixes": "backends custom_ops functional metadata",
    "compat": "backends custom_ops functional",
    "vllm": "backends compat custom_ops",
    "compile": "custom_ops version",
    "profiling": "custom_ops",
    "graphs": "compile custom_ops metadata",
    "hf": "attention backends cache compat compile custom_ops few_tokens functional metadata model_state "
    "prefixes profiling",
    "activations": "",
    "few_tokens": "activations custom_ops",
    "module_settings": "few_tokens",
    "model_state": "custom_ops few_tokens module_settings",
    "fuse": "activations backends custom_ops few_tokens hf metadata model_state",
    "engine": "backends cache custom_ops fuse graphs hf metadata model_state prefixes profiling",
    "testing": f"{ENGINE} prefixes",
    "cli": f"{ENGINE} testing",
    "": "attention backends cache compile custom_ops functional metadata version",
    "__main__": "cli",
}
ROOMS = {name: others.split() for name, others in _ROOMS.items()}
#: Arrows that are allowed though they lead up: inside functions, for names that are given out where users
#: look for them.
LAZY = {
    ("torchpaged.hf", "torchpaged.fuse"),
    ("torchpaged.hf", "torchpaged.engine"),
    *(
        ("torchpaged", f"torchpaged.{name}")
        for name in ("compat", "engine", "fuse", "graphs", "hf", "layers", "profiling", "testing")
    ),
}
#: Of custom_ops, what graphs may know.
OF_GRAPHS = (f"{OPS}.errors", f"{OPS}.checks", f"{OPS}.words")
#: Who outside custom_ops names a kernel's or a reference's module: the compiler's own users, tests
#: and benchmarks.
NAMES_KERNELS = (
    "torchpaged.compile.compile_cache",
    "torchpaged.backends.cuda",
    "torchpaged.backends.flashinfer_gdn",
    "torchpaged.testing",
)
FAMILIES = (
    *("attention", "block_ops", "cache_write", "experts", "indexer", "layers", "mla", "state"),
    "step_end",
)
#: Part of a family -> the parts of its own family, and the folders shared by all, that it may import; the
#: files of custom_ops itself always.
_PARTS: dict[str, tuple[str, str]] = {
    "schema": ("", ""),
    "mask": ("", ""),
    "limits": ("", ""),
    "call": ("call mask", ""),  # a record of another family, too, that this one's is put in terms of
    "fp8_rows": ("call", ""),  # a format, which the contract and all kernels read
    "check": ("call cascade_call fp8_rows limits mask", ""),
    "cascade_call": ("call", ""),  # calls, too
    "channels": ("call", ""),  # likewise
    "check_steps": ("call channels check", ""),
    "fake": ("call cascade_call fp8_rows", ""),
    "selection": ("call fp8_rows", ""),
    "reference": ("call cascade_call channels check check_steps fp8_rows mask selection", ""),
    "cpu": ("call check check_steps fp8_rows selection", ""),
    "packing": ("triton", ""),  # no op: between steps
    "many_copies": ("", ""),  # likewise
    "triton": ("call cascade_call channels check check_steps fp8_rows limits mask triton", "triton"),
    # what they can't take, Triton's kernels do
    "cuda": ("call cascade_call check check_steps limits mask triton cuda", "triton cuda"),
}
PARTS = {part: (own.split(), folders.split()) for part, (own, folders) in _PARTS.items()}


class Arrow(NamedTuple):
    """``source`` imports ``target``, which need not be a module of ours; ``lazy``: inside a function, or for
    types only."""

    source: str
    target: str
    lazy: bool


def module_of(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    parts = parts if parts[0] == "torchpaged" else ["torchpaged", *parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, Path]:
    """Every module by its name; linked folders once."""
    found = [path for part in ("custom_ops", "graphs") for path in (ROOT / part).rglob("*.py")]
    found += [
        path
        for path in (ROOT / "torchpaged").rglob("*.py")
        if path.relative_to(ROOT).parts[1] not in ("custom_ops", "graphs")
    ]
    return {module_of(path): path for path in found}


def imports_of(source: str, text: str, modules: set[str]) -> Iterator[Arrow]:
    """The imports of a module: as statements, or as ``import_module`` of a plain string. ``from a import b``
    names a.b if that is a module."""

    def walk(node: ast.AST, lazy: bool) -> Iterator[Arrow]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Arrow(source, alias.name, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, f"{source}: a relative import"
                whole = [f"{child.module}.{alias.name}" for alias in child.names]
                yield from (
                    Arrow(source, name if name in modules else child.module or "", lazy) for name in whole
                )
            elif (
                isinstance(child, ast.Call)
                and ast.unparse(child.func).endswith("import_module")
                and isinstance(child.args[0], ast.Constant)
            ):
                yield Arrow(source, str(child.args[0].value), True)
            deeper = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            typing_only = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
            yield from walk(child, lazy or deeper or typing_only)

    return walk(ast.parse(text), False)


SOURCES = sources()
MODULES = set(SOURCES)


@functools.cache  # not when tests are collected, which every process does
def all_arrows() -> list[Arrow]:
    return sorted(
        {arrow for name, path in SOURCES.items() for arrow in imports_of(name, path.read_text(), MODULES)}
    )


@functools.cache
def inside() -> list[Arrow]:
    return [arrow for arrow in all_arrows() if arrow.target.split(".")[0] == "torchpaged"]


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def place(module: str) -> tuple[str, str] | None:
    """Family and part of a module of custom_ops, or None: a file of all, or a folder shared by all."""
    family, _, rest = module.removeprefix(f"{OPS}.").partition(".")
    return (family, rest.split(".")[0]) if family in FAMILIES and rest else None


def circles(arrows: set[tuple[str, str]]) -> list[list[str]]:
    """Groups of modules that reach each other (Tarjan's strongly connected components, by repeated search:
    few and small graphs)."""
    after: dict[str, set[str]] = {}
    for source, target in arrows:
        after.setdefault(source, set()).add(target)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(after.get(start, ()))
        while todo:
            module = todo.pop()
            if module not in seen:
                seen.add(module)
                todo += after.get(module, ())
        return seen

    reach = {module: reached(module) for module in after}
    found = {
        frozenset(other for other in reach[module] if module in reach.get(other, ()))
        for module in after
        if module in reach[module]
    }
    return sorted(sorted(group) for group in found)


def with_packages(arrow: Arrow) -> Iterator[tuple[str, str]]:
    """The arrow, and those to the packages that the import runs first and that its source is not in."""
    parts = arrow.target.split(".")
    for length in range(2, len(parts) + 1):
        target = ".".join(parts[:length])
        if target in MODULES and not f"{arrow.source}.".startswith(f"{target}."):
            yield arrow.source, target


# -------------------------------------------------------------------------------------------------- the tests
def test_all_modules_are_looked_at() -> None:
    assert len(MODULES) > 180
    assert len(inside()) > 500
    assert {room(module) for module in MODULES} == set(ROOMS), (
        "every room is in the table, and none that is not there"
    )
    unknown = [arrow for arrow in inside() if arrow.target not in MODULES]
    assert not unknown, unknown


@pytest.mark.parametrize("name", ROOMS)
def test_no_arrow_up(name: str) -> None:
    wrong = [
        f"{arrow.source} imports {arrow.target}"
        for arrow in inside()
        if room(arrow.source) == name
        and room(arrow.target) not in (name, *ROOMS[name])
        and not (arrow.lazy and (arrow.source, arrow.target) in LAZY)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_table_itself_leads_down() -> None:
    assert not circles({(name, other) for name, others in ROOMS.items() for other in others})
    assert all(
        any((arrow.source, arrow.target) == pair and arrow.lazy for arrow in inside()) for pair in LAZY
    ), "an exception without use"


def test_no_circle() -> None:
    arrows = {
        pair for arrow in inside() for pair in with_packages(arrow) if pair not in LAZY and pair[0] != pair[1]
    }
    assert not circles(arrows), "\n".join(" <-> ".join(group) for group in circles(arrows))


def test_graphs_know_no_op() -> None:
    wrong = [
        arrow
        for arrow in inside()
        if room(arrow.source) == "graphs"
        and room(arrow.target) == "custom_ops"
        and arrow.target not in OF_GRAPHS
    ]
    assert not wrong, wrong


def test_backends_do_not_import_each_other() -> None:
    backends = {
        name
        for name, path in SOURCES.items()
        if room(name) == "backends" and "\nBACKEND = " in path.read_text()
    }
    assert len(backends) >= 4
    wrong = [arrow for arrow in inside() if {arrow.source, arrow.target} <= backends]
    assert not wrong, wrong


def test_kernels_and_references_are_reached_through_ops() -> None:
    """A family's files import their own family alone: the kernels its checks, the reference its checks, and
    neither the other."""
    wrong = []
    of_ops = [arrow for arrow in inside() if arrow.source.startswith(OPS) and arrow.target.startswith(OPS)]
    for arrow in of_ops:
        source, target = place(arrow.source), place(arrow.target)
        shared = arrow.target.removeprefix(f"{OPS}.").split(".")[0]
        if source is None:
            from_families = (
                arrow.source == f"{OPS}.families"
                and target is not None
                and target[1] in ("schema", "fake", "call", "cascade_call", "channels")
            )
            of_kernels = shared in ("triton", "cuda") and not arrow.source.startswith(
                (f"{OPS}.{shared}.", f"{OPS}.triton.")
            )
            asks_compiler = arrow == Arrow(f"{OPS}.registry", f"{OPS}.cuda.jit", True)
            fine = from_families or asks_compiler or (target is None and not of_kernels)
        else:
            own, folders = PARTS[source[1]]
            if target is not None:
                between = source[1] == "call" == target[1]
                fine = (target[0] == source[0] or between) and target[1] in own
            else:
                fine = (
                    shared in folders
                    if shared in ("triton", "cuda")
                    else arrow.target not in (OPS, f"{OPS}.registry")
                )
        if not fine:
            wrong.append(f"{arrow.source} imports {arrow.target}")
    assert not wrong, "\n".join(wrong)
    seen = {place(module) for module in MODULES if place(module)}
    assert {part for _, part in seen if part} <= set(PARTS) and len(seen) > 15  # type: ignore[misc]


def test_no_room_above_names_a_kernel() -> None:
    deep = {"triton", "cuda", "cpu", "reference"}
    wrong = [
        f"{arrow.source} imports {arrow.target}"
        for arrow in inside()
        if arrow.target.startswith(f"{OPS}.")
        and deep & set(arrow.target.removeprefix(OPS).split("."))
        and not arrow.source.startswith((OPS, *NAMES_KERNELS))
    ]
    assert not wrong, "\n".join(wrong)


def test_custom_ops_import_torch_only() -> None:
    wrong = []
    for arrow in all_arrows():
        package = arrow.target.split(".")[0]
        if (
            not arrow.source.startswith(OPS)
            or package in sys.stdlib_module_names
            or arrow.target.startswith(("torch.", f"{OPS}."))
        ):
            continue
        kernels = "triton" in arrow.source.split(".") and package == "triton"
        lazily = arrow.lazy and {"cuda", "triton"} & set(arrow.source.split(".")) and package == "cuda"
        if arrow.target not in ("torch", OPS) and not kernels and not lazily:
            wrong.append(f"{arrow.source} imports {arrow.target}")
    assert not wrong, "\n".join(wrong)


def test_imports_are_found_wherever_they_stand() -> None:
    text = """
import torchpaged.a
from torchpaged import b, c as d
if TYPE_CHECKING:
    from torchpaged.e import f
def load():
    from torchpaged.g import h
    importlib.import_module("torchpaged.i")
"""
    found = {
        (arrow.target, arrow.lazy)
        for arrow in imports_of("torchpaged.x", text, {"torchpaged.b", "torchpaged.g"})
    }
    assert found == {
        ("torchpaged.a", False),
        ("torchpaged.b", False),
        ("torchpaged", False),
        ("torchpaged.e", True),
        ("torchpaged.g", True),
        ("torchpaged.i", True),
    }


def test_circles_are_found() -> None:
    assert circles({("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")}) == [["a", "b", "c"]]
    assert circles({("a", "b"), ("a", "c"), ("b", "c")}) == []
