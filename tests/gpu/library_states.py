"""What library_worker.py proves of a backend whose library runs prompts of delta nets: the float64 oracle,
one capture for prompts of other lengths, and a model in the engine."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from captured import captured
from op_inputs.state import (
    LONG_BATCHES,
    STATE_BATCHES,
    Rows,
    assert_state_close,
    clone,
    make_linear_inputs,
    with_nan_in_padding,
    with_odd_strides,
)
from torch import Tensor

from torchpaged.backends import Backend, flashinfer_gdn
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.state.call import LinearAttentionCall

_WIDE: dict[str, Any] = {"dtype": torch.bfloat16, "key_dim": 128, "value_dim": 128}
#: Backend -> sizes of its calls; a model of it, with sizes of the model's config.
SIZES: dict[str, dict[str, Any]] = {"flashinfer_gdn": _WIDE}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "flashinfer_gdn": (
        "qwen3_next",
        {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    )
}
#: Backend -> what is called: key heads, heads, and whether FlashInfer splits rows, which it does in three
#: ways by the number of heads.
HEADS: dict[str, dict[str, tuple[int, int, bool]]] = {
    "flashinfer_gdn": {
        "whole": (4, 16, False),
        "split": (1, 2, True),
        "split 16": (4, 16, True),
        "split 30": (6, 30, True),
    }
}
BATCHES = {name: (STATE_BATCHES | LONG_BATCHES)[name] for name in ("long", *LONG_BATCHES)} | {
    "one": Rows(((0, 1000),)),
    "chunk": Rows(((900, 700),), padded_tokens=68),
    "two": Rows(((0, 65), (3, 640))),
}


def on_gpu(inputs: dict[str, Any]) -> dict[str, Any]:
    """Tensors there with the strides that they had."""

    def moved(x: Tensor) -> Tensor:
        whole = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
        return whole.copy_(x)

    return {name: moved(x) if isinstance(x, Tensor) else x for name, x in inputs.items()}


def sizes_of(backend: Backend, heads: str) -> dict[str, Any]:
    """Of a call; FlashInfer splits its rows, or does not, whatever their length."""
    key_heads, num_heads, splits = HEADS[backend.name][heads]
    if backend.name == "flashinfer_gdn":
        flashinfer_gdn.splits_rows = lambda call: splits
        flashinfer_gdn.FEW_TOKENS = flashinfer_gdn.SPLIT_TOKENS
    return {**SIZES[backend.name], "key_heads": key_heads, "heads": num_heads}


def module_of(backend: Backend) -> Any:
    return importlib.import_module(f"torchpaged.backends.{backend.name}")


def close(backend: Backend, batch: str, heads: str, state_dtype: torch.dtype = torch.float32) -> None:
    sizes = {**sizes_of(backend, heads), "state_dtype": state_dtype}
    inputs = on_gpu(with_nan_in_padding(with_odd_strides(make_linear_inputs(BATCHES[batch], **sizes))))
    assert module_of(backend).why_own(LinearAttentionCall(**inputs)) is None
    assert_state_close(backend.ops, BACKEND_OPS["reference"], "linear_attention", inputs, torch.bfloat16)


def check_captured(linear_attention: Callable[..., object], sizes: dict[str, Any]) -> None:
    """Of the captured tokens some are behind the last row; rows are longer or shorter than they were."""
    first = on_gpu(make_linear_inputs(Rows(((0, 90), (4, 70), (3, 1)), 39), **sizes)) | {"max_query_len": 200}
    graph, _ = captured(lambda: linear_attention(**first))
    for rows in (Rows(((5, 1), (0, 199), (0, 0))), Rows(((7, 3), (9, 64), (0, 65)), 68, void=(1,))):
        given = on_gpu(make_linear_inputs(rows, seed=1, **sizes)) | {"max_query_len": 200}
        for name, x in given.items():
            if isinstance(x, Tensor):
                first[name].copy_(x)
        graph.replay()
        want = clone(given)
        linear_attention(**want)
        assert torch.equal(first["out"], want["out"])
        torch.testing.assert_close(first["state"], want["state"], rtol=0, atol=0, equal_nan=True)


def in_the_engine(backend: Backend, **way: Any) -> None:
    """The tokens of the device's own kernels. One model of bfloat16, whose logits are far apart."""
    from model_coverage.architectures import OPTIONS, config_of, with_random_weights
    from transformers import AutoModelForCausalLM

    from torchpaged.engine import Generator, SamplingParams
    from torchpaged.hf import attach

    name, sizes = MODELS[backend.name]
    config = config_of(name, OPTIONS[name] | sizes | {"max_position_embeddings": 1024})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = with_random_weights(model).to(torch.bfloat16).eval().cuda()
    model.generation_config.eos_token_id = None
    model.set_experts_implementation("batched_mm")
    attach(model)
    prompts = [[(7 * i + 3 * j * j) % 90 + 5 for j in range(n)] for i, n in enumerate((150, 70, 3, 400, 65))]
    sampling, tokens = SamplingParams(max_new_tokens=8, ignore_eos=True), []
    served: list[Any] = []
    module, options = module_of(backend), {"max_batch_size": 3, "max_seq_len": 512, "block_size": 16, **way}
    run = module._run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_run", lambda call, rows: (served.append(call), run(call, rows))[1])
        for chosen in ("cuda", backend.name):
            outputs = Generator(model, backend=chosen, **options).generate(prompts, sampling)
            tokens.append([output.token_ids for output in outputs])
    assert served
    assert tokens[0] == tokens[1], tokens


def state_checks(backend: Backend) -> Iterator[tuple[str, Callable[[], Any]]]:
    """By name, cheap ones first."""
    for batch in BATCHES:
        for heads in HEADS[backend.name]:
            yield f"{batch} {heads}", lambda batch=batch, heads=heads: close(backend, batch, heads)
    for heads in list(HEADS[backend.name])[:2]:
        yield (
            f"long {heads}, states of bfloat16",
            lambda heads=heads: close(backend, "long", heads, torch.bfloat16),
        )
        yield (
            f"captured {heads}",
            lambda heads=heads: check_captured(backend.ops.linear_attention, sizes_of(backend, heads)),
        )


def engine_checks(backend: Backend) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Ways of the engine, by name."""
    for way in ({}, {"mixed_steps": False, "prefill_chunk_size": 96}, {"fuse": True}):
        yield f"engine {way}", lambda way=way: in_the_engine(backend, **way)
