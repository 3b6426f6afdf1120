"""A call in a CUDA graph, made as a user makes one."""

from collections.abc import Callable
from typing import Any

import torch


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph and what the call in it gave."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())  # which may still be writing what the call reads
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        out = call()
    return graph, out
