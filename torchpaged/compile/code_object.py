"""One compilation per copy of a function: code objects of their own for torch.compile.

    compiled = torch.compile(with_own_code(step, "decode_8"), fullgraph=True, dynamic=False)

Dynamo keeps its compiled entries, and counts its recompile limit, per code object: shared by all batch sizes,
the limit of 8 would end the ninth.
"""

import types
from collections.abc import Callable
from typing import Any


def with_own_code(function: Callable[..., Any], name: str) -> Any:
    """``function``, closure included, with a code object of its own, called ``name``.

    Args:
        function: a Python function without default arguments; a small one as a rule, since dynamo inlines
            what it calls.
        name: as it stands in stack traces and in the compiler's logs.
    """
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, None, function.__closure__)
