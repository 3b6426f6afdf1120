"""Inductor's own programmatic launches are refused while our kernels start early.

Ops of attention, of states and of a step's end read lengths, tables, slots or keys before the kernels ahead
of them have ended (docs/stream_order.md). That is right as long as what wrote these did not let its
dependents start. Kernels that Inductor makes may hold such a write, a copy or an addition that it moved in
front of the op; with its programmatic launch on, they let dependents start before they have stored anything.
"""

import sys

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import BackendUnavailableError

#: Ops with a kernel that reads early what a step may write. Which kernels read which tensors is in the table
#: of tests/support/stream_order.py; tests/custom_ops/test_stream_order.py compares the two.
READS_EARLY = (
    "paged_attention",
    "cascade_attention",
    "write_kv",
    "rope_write_kv",
    "mla_attention",
    "rope_write_latent",
    "causal_conv",
    "delta_step",
    "mamba2_step",
    "index_logits",
    "finish_step",
)


def refuse_inductors_for(tensor: Tensor) -> None:
    """`refuse_inductors` if kernels on the device of ``tensor``, a fake one perhaps, are launched early:
    compute capability 9.0 and later."""
    if (
        tensor.device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(tensor.device) >= (9, 0)
    ):
        refuse_inductors()


def refuse_inductors() -> None:
    """Called ahead of the fake kernels of the ops that read early, while a graph is traced, also under
    ``torch.compile(options=...)``, which turns the option on for the compilation only; and before a device's
    first early launch. Not before each: asking takes as long as a launch.

    Raises:
        BackendUnavailableError: ``torch._inductor.config.triton.enable_pdl`` is on; nothing is compiled or
            launched then.
    """
    # A private module of torch, and the only place that knows; tests/custom_ops/test_early_launch.py notices
    # when it moves. Not imported here: without it there is no kernel of Inductor's either.
    config = sys.modules.get("torch._inductor.config")
    if config is not None and getattr(config.triton, "enable_pdl", False):
        raise BackendUnavailableError(
            "torch._inductor.config.triton.enable_pdl: expected False while torchpaged's kernels start "
            "before the kernels ahead of them have ended, got True; unset TORCHINDUCTOR_ENABLE_PDL or set "
            "the option to False before anything is compiled"
        )
