"""Argument checks of ``delta_step``, ``mamba2_step``, ``selective_scan`` and ``rg_lru``, shared by
the reference and the kernels."""

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import check_device, check_dims, check_tensor, given, reads_values, shape_of
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.memory import check_apart
from torchpaged.custom_ops.plain_torch import exact_dtype
from torchpaged.custom_ops.pools import FLOATS
from torchpaged.custom_ops.state.call import DeltaStepCall, Mamba2StepCall
from torchpaged.custom_ops.state.channels import RgLruCall, SelectiveScanCall
from torchpaged.custom_ops.state.check import (
    check_batch,
    check_causal_conv,
    check_delta_gates,
    check_gated_rms_norm,
    check_linear_attention,
)


def _check_heads(x: Tensor, state: Tensor, out: Tensor) -> None:
    """Queries, keys and values of state's sizes in x, values in out."""
    check_dims("x", x, None, None)
    check_dims("state", state, None, None, None, None)
    if min(state.shape) < 1:
        raise ArgumentError("state", "at least one slot, head, row and column", shape_of(state))
    _, num_heads, key_dim, value_dim = state.shape
    keys, rest = divmod(x.shape[1] - num_heads * value_dim, 2 * key_dim)
    if keys < 1 or rest or num_heads % keys:
        raise ArgumentError(
            "x",
            f"queries and keys of {key_dim} and values of {value_dim} numbers, of {num_heads} heads or, of "
            "queries and keys, of a number that divides it",
            shape_of(x),
        )
    check_tensor("out", out, (x.shape[0], num_heads, value_dim), x.dtype)


def check_delta_step(call: DeltaStepCall) -> None:
    """Every argument of ``delta_step``; raises `ArgumentError` before anything is written."""
    x, state, out, norm_weight = call.x, call.state, call.out, call.norm_weight
    _check_heads(x, state, out)
    _, num_heads, key_dim, value_dim = state.shape
    check_dims("a", call.a, x.shape[0], None, None)
    if call.a.shape[1] * call.a.shape[2] not in (num_heads, num_heads * key_dim):
        said = f"groups of {num_heads} or {num_heads * key_dim} numbers per token in all"
        raise ArgumentError("a", said, shape_of(call.a))
    check_dims("a_log", call.a_log, num_heads)
    of_heads = state.shape[1:2] if norm_weight.dim() == 2 else ()
    check_tensor("norm_weight", norm_weight, (*of_heads, value_dim), x.dtype, torch.float32)
    conv, gates, attention, norm = call.parts()
    check_causal_conv(conv)
    check_delta_gates(gates)
    check_linear_attention(attention)
    check_gated_rms_norm(norm)
    check_device(state.device, x=x, a=call.a)
    read = given(
        x=x, weight=call.weight, bias=call.bias, a=call.a, b=call.b, a_log=call.a_log, dt_bias=call.dt_bias
    )
    read |= {"gate": call.gate, "norm_weight": norm_weight}
    check_apart({"conv_state": call.conv_state}, read | {"state": state, "out": out}, "pass a copy: .clone()")
    check_apart({"state": state}, read | {"out": out}, "pass a copy: .clone()")
    check_apart({"out": out}, read, "allocate out with torch.empty")


def check_mamba2_step(call: Mamba2StepCall) -> None:
    """Every argument of ``mamba2_step``; raises `ArgumentError` before anything is written."""
    x, state, out, dt, gate, semaphore = call.x, call.state, call.out, call.dt, call.gate, call.semaphore
    _check_heads(x, state, out)
    num_heads = state.shape[1]
    check_tensor("dt", dt, (x.shape[0], num_heads), x.dtype)
    check_dims("a_log", call.a_log, num_heads)
    check_tensor("skip_weight", call.skip_weight, (num_heads,), x.dtype, torch.float32)
    if gate is not None:
        check_tensor("gate", gate, out.shape, x.dtype)
    conv, gates, attention = call.parts()
    check_causal_conv(conv)
    check_delta_gates(gates)
    check_linear_attention(attention)
    read = given(
        x=x, weight=call.weight, bias=call.bias, dt=dt, a_log=call.a_log, dt_bias=call.dt_bias, gate=gate
    )
    read["skip_weight"] = call.skip_weight
    check_device(state.device, out=out, **read)
    if semaphore is not None:
        _check_semaphore(semaphore, call.state_slots.shape[0] * call.num_groups, state.device)
        check_apart({"semaphore": semaphore}, read | {"state": state, "out": out}, "give it its own memory")
    check_apart({"conv_state": call.conv_state}, read | {"state": state, "out": out}, "pass a copy: .clone()")
    check_apart({"state": state}, read | {"out": out}, "pass a copy: .clone()")
    check_apart({"out": out}, read, "allocate out with torch.empty")


def _check_semaphore(semaphore: Tensor, least: int, device: torch.device) -> None:
    check_tensor("semaphore", semaphore, (None,), torch.int32)
    check_device(device, semaphore=semaphore)
    if semaphore.shape[0] < least:
        raise ArgumentError("semaphore", f"at least num_reqs * groups = {least} numbers", shape_of(semaphore))
    if reads_values(device) and bool(semaphore.any()):
        raise ArgumentError("semaphore", "zeros", "other numbers", "give it torch.zeros")


def _check_channels(call: SelectiveScanCall | RgLruCall, key_dim: int, parameters: dict[str, Tensor]) -> None:
    """What both have, behind what each has alone; ``parameters``: that were checked."""
    x, state, out = call.x, call.state, call.out
    exact = exact_dtype(x.dtype)
    check_tensor("state", state, (None, x.shape[1], key_dim, 1), x.dtype, exact)
    if min(state.shape) < 1:
        raise ArgumentError("state", "at least one slot, channel and number", shape_of(state))
    own = given(gate=call.gate, out=out)
    for name, tensor in own.items():
        check_tensor(name, tensor, x.shape, x.dtype)
    read = {"x": x, **own, **parameters}
    del read["out"]
    check_device(state.device, out=out, **read)
    check_apart({"state": state}, read | {"out": out}, "pass a copy: .clone()")
    check_apart({"out": out}, read, "allocate out with torch.empty")
    check_batch(call, state)


def check_selective_scan(call: SelectiveScanCall) -> None:
    """Every argument of ``selective_scan``; raises `ArgumentError` before anything is written."""
    x = call.x
    check_tensor("x", x, (None, None), *FLOATS)
    channels = x.shape[1]
    check_tensor("a_log", call.a_log, (channels, None), x.dtype, torch.float32)
    read = {"a_log": call.a_log, "dt": call.dt, "b": call.b, "c": call.c}
    keys = x.shape[0], call.a_log.shape[1]
    for name, size in (("dt", x.shape), ("b", keys), ("c", keys)):
        check_tensor(name, read[name], size, x.dtype)
    for name, tensor in (("dt_bias", call.dt_bias), ("skip_weight", call.skip_weight)):
        check_tensor(name, tensor, (channels,), x.dtype, torch.float32)
        read[name] = tensor
    _check_channels(call, keys[1], read)


def check_rg_lru(call: RgLruCall) -> None:
    """Every argument of ``rg_lru``; raises `ArgumentError` before anything is written."""
    x, dtypes = call.x, (call.x.dtype, torch.float32)
    check_tensor("x", x, (None, None), *FLOATS)
    check_dims("input_weight", call.input_weight, None, None, None)
    blocks, width, _ = call.input_weight.shape
    if blocks * width != x.shape[1]:
        said = f"blocks of x's {x.shape[1]} channels in all"
        raise ArgumentError("input_weight", said, shape_of(call.input_weight))
    parameters = {"recurrent_param": call.recurrent_param}
    check_tensor("recurrent_param", call.recurrent_param, (x.shape[1],), *dtypes)
    for gate in ("input", "recurrent"):
        for name, size in ((f"{gate}_weight", (blocks, width, width)), (f"{gate}_bias", (blocks, width))):
            parameters[name] = getattr(call, name)
            check_tensor(name, parameters[name], size, *dtypes)
    _check_channels(call, 1, parameters)
