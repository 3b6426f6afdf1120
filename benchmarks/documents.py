"""What scripts share: their options, rounds of calls on a GPU, and the document at the end."""

import argparse
import dataclasses
import json
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measuring import conditions, split
from measuring.timing import Call, CudaSampler, interleave

from torchpaged.custom_ops import native_status


class _Several(argparse.Action):
    """Of ``1,8`` and of ``1 8`` the same list."""

    def __call__(self, _: Any, found: argparse.Namespace, values: Any, __: Any = None) -> None:
        parts = [part for value in values for part in value.split(",") if part]
        setattr(found, self.dest, [self.const(part) for part in parts])


def command_line(doc: str | None, **named: Any) -> argparse.Namespace:
    """What the command line gives for a script whose docstring is ``doc``.

    Args:
        named: option -> its default, or (default, help). A type: of an option without a default; a list: of
            several values, by commas or spaces, [int]: of none by default; False: a switch; a dict: arguments
            of ``add_argument``.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in named.items():
        default, text = value if isinstance(value, tuple) else (value, None)
        if isinstance(default, dict):
            how = default
        elif isinstance(default, bool):
            how = {"action": "store_true"}
        elif isinstance(default, list):
            (first, *_), no_default = default, isinstance(default[0], type)
            how = {"action": _Several, "nargs": "+", "const": first if no_default else type(first)}
            how["default"] = [] if no_default else default
        elif isinstance(default, type):
            how = {"type": default}
        else:
            how = {"type": type(default), "default": default}
        parser.add_argument("--" + name.replace("_", "-"), **{"help": text, **how})
    return parser.parse_args()


def need_native() -> None:
    loaded, reason = native_status()
    if not loaded:
        raise SystemExit(f"the native kernels are needed: {reason}")


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in split(text))


_READ: dict[Any, Any] = {Sequence[str]: split, Sequence[int]: numbers}


def parser_of(fields: type, description: str, **words: str) -> argparse.ArgumentParser:
    """Of a dataclass whose fields are `torchpaged.names.option`; ``words``: help of those that are none. A
    switch that is on has ``--no-`` before its name."""
    parser, kinds = argparse.ArgumentParser(description=description), typing.get_type_hints(fields)
    for field in dataclasses.fields(fields):
        kind, on = kinds[field.name], field.default is True
        how: dict[str, Any] = {"default": field.default, "dest": field.name}
        if kind is bool:
            how["action"] = "store_false" if on else "store_true"
        elif kind == list[str] | None:
            how["action"] = "append"
        else:
            how["type"] = _READ.get(kind) or (typing.get_args(kind) or (kind,))[0]
        text = field.metadata.get("help") or words[field.name]
        parser.add_argument(f"--{'no-' * on}{field.name.replace('_', '-')}", help=text, **how)
    return parser


def keep(document: dict[str, Any], output: Path | str | None) -> None:
    """Write ``document`` to ``output``, if there is one: after each row, so that a run that is cut short
    keeps what it has."""
    if output:
        Path(output).write_text(json.dumps(document, indent=1) + "\n")


def finish(document: dict[str, Any], output: Path | str | None) -> None:
    """`keep` it, and print it as one line."""
    keep(document, output)
    print(json.dumps(document))


def write_rows(rows: Sequence[dict[str, Any]], output: str | None, device: str = "cuda") -> None:
    """`finish` with ``rows`` and the conditions on the device."""
    finish({"rows": rows, "conditions": conditions.collect(torch.device(device))}, output)


def time_layers(calls: dict[str, list[Call]], layers: int, repeats: int) -> dict[str, float]:
    """Median microseconds per call of each contender, in turns; a round is at least 8 calls, one CUDA graph.

    Args:
        calls: one for each of the ``layers``.
        repeats: rounds of each.
    """
    samplers = {name: CudaSampler(each * max(1, 8 // layers)) for name, each in calls.items()}
    return {name: round(timing.median_us, 2) for name, timing in interleave(samplers, repeats).items()}


def write_results(rows: Sequence[dict[str, Any]], path: Path | None) -> None:
    """``rows`` and the conditions on the GPU as JSON, if there is a ``path``."""
    keep({"results": rows, "conditions": conditions.collect(torch.device("cuda"))}, path)
