"""Encoder-decoder models of transformers, tiny and random, through a `PagedEncoderDecoderCache` without
further arguments, against transformers' own eager attention in float32.

Four checks, each over logits, and so over greedy tokens:

    generate   sources padded on the right by lengths of their own, through generate()
    prompt     the same behind a decoder's prompt that is longer than the shortest source
    forward    one forward without a cache, its decoder's input as long as the padded source
    compiled   ``generate`` again, its decode step under ``fullgraph=True``; counted in graphs
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from greedy import greedy
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    PreTrainedModel,
)

from model_coverage.architectures import OF_BERT, config_of, sizes, with_random_weights
from model_coverage.checks import (
    Beat,
    Row,
    compiling,
    counted_graphs,
    difference,
    eager_failed,
    judge_bad,
    run_checks,
    run_compiled,
)
from torchpaged.hf import PagedEncoderDecoderCache, attach

MODES = ("paged", "dense", "no cache", "refused", "wrong", "broken", "unexamined")
NEW_TOKENS = 6
_LENS = (16, 11, 4)


class Family(NamedTuple):
    """One family: what its config says over `architectures.SIZES`, and the shape of one row of an encoder's
    input that is no text."""

    options: Mapping[str, Any] = MappingProxyType({})
    shape: tuple[int, ...] = ()


_T5 = Family({"d_kv": 16, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4})
_GEMMA: dict[str, Any] = {
    **sizes(*OF_BERT, "num_key_value_heads", "head_dim", "max_position_embeddings"),
    **sizes("pad_token_id", "bos_token_id", "eos_token_id"),
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": None,
}
_BERT: dict[str, Any] = {"model_type": "bert", **sizes(*OF_BERT)}
FAMILIES: dict[str, Family] = {
    "bart": Family(),
    "bigbird_pegasus": Family({"attention_type": "original_full"}),
    "blenderbot": Family(),
    "blenderbot-small": Family(),
    "encoder-decoder": Family(
        {
            "encoder": _BERT,
            "decoder": {**_BERT, "is_decoder": True, "add_cross_attention": True},
            "decoder_start_token_id": 1,
            "pad_token_id": 0,
            "vocab_size": None,
            "eos_token_id": None,
            "bos_token_id": None,
        }
    ),
    "fsmt": Family({"langs": ["a", "b"], "src_vocab_size": 128, "tgt_vocab_size": 128}),
    "led": Family({"attention_window": 8, "max_encoder_position_embeddings": 64}),
    "longt5": Family({**_T5.options, "encoder_attention_type": "local", "local_radius": 4}),
    "m2m_100": Family(),
    "marian": Family({"decoder_vocab_size": 128}),
    "mbart": Family(),
    "moonshine": Family({"pad_head_dim_to_multiple_of": None}, (4000,)),
    "mt5": _T5,
    "mvp": Family(),
    "nllb-moe": Family({"num_experts": 2, "encoder_sparse_step": 2, "decoder_sparse_step": 2}),
    "pegasus": Family(),
    "pegasus_x": Family({"block_size": 8}),
    "plbart": Family(),
    "prophetnet": Family({"ngram": 2}),
    "speech_to_text": Family(
        {
            "num_conv_layers": 2,
            "conv_kernel_sizes": (3, 3),
            "conv_channels": 32,
            "input_feat_per_channel": 16,
            "input_channels": 1,
            "max_source_positions": 64,
            "max_target_positions": 64,
        },
        (64, 16),
    ),
    "switch_transformers": Family(
        {**_T5.options, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    ),
    "t5": _T5,
    "t5gemma": Family({"encoder": _GEMMA, "decoder": _GEMMA, "vocab_size": 128}),
    "umt5": _T5,
    "whisper": Family({"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64}, (16, 64)),
}


def model_types() -> list[str]:
    """The families that this transformers has, sorted."""
    return sorted(name for name in FAMILIES if name in CONFIG_MAPPING)


def model_of(model_type: str) -> PreTrainedModel:
    """The tiny model of a family on transformers' eager attention, the same weights every time."""
    config = config_of(model_type, dict(FAMILIES[model_type].options))
    mappings: tuple[Any, ...] = (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING)
    found = next(found for mapping in mappings if (found := mapping.get(type(config), None)) is not None)
    found = found[0] if isinstance(found, (tuple, list)) else found
    torch.manual_seed(0)
    model = with_random_weights(found._from_config(config, dtype=torch.float32, attn_implementation="eager"))
    for name in ("forced_bos_token_id", "forced_eos_token_id", "eos_token_id"):
        setattr(model.generation_config, name, None)  # every token is the model's own
    model.generation_config.decoder_start_token_id = 1
    return model


def inputs_of(model: PreTrainedModel, model_type: str, prompt: int = 0) -> dict[str, Tensor]:
    """Sources of `_LENS` tokens, padded on the right; ``prompt``: tokens of the decoder's, 0 = none."""
    generator = torch.Generator().manual_seed(1)
    shape, rows = FAMILIES[model_type].shape, len(_LENS)
    given: dict[str, Tensor] = {}
    if shape:
        given[model.main_input_name] = torch.randn(rows, *shape, generator=generator)
        # Moonshine takes a mask of its samples, speech_to_text one of its frames, Whisper none.
        size = {"moonshine": shape[0], "speech_to_text": shape[0]}.get(model_type, 0)
    else:
        size = max(_LENS)
        given["input_ids"] = torch.randint(5, 97, (rows, size), generator=generator)
    if size:
        counts = torch.tensor([size * n // max(_LENS) for n in _LENS])[:, None]
        given["attention_mask"] = (torch.arange(size)[None] < counts).long()
    if not shape:
        given["input_ids"][given["attention_mask"] == 0] = 0
    if prompt:
        given["decoder_input_ids"] = torch.randint(5, 97, (rows, prompt), generator=generator)
    return given


def generate(model: PreTrainedModel, inputs: dict[str, Tensor], cache: Any = None, **options: Any) -> Any:
    """Logits of every new token ``[tokens, rows, vocab]``, and the cache behind them."""
    plain = super(type(model), model).generate if model.config.model_type == "whisper" else model.generate
    return greedy(model, inputs, cache, plain, max_new_tokens=NEW_TOKENS, num_beams=1, **options)


def _forward(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(**inputs, use_cache=False).logits
    return logits.flatten(0, 1)


def _encoder_tokens(model: PreTrainedModel, inputs: dict[str, Tensor]) -> int:
    """Tokens per row that the decoder attends to."""
    with torch.no_grad():
        names = {model.main_input_name, "input_ids", "attention_mask"} & inputs.keys()
        return int(model.get_encoder()(**{name: inputs[name] for name in names})[0].shape[1])


def examine(model_type: str, *, compiled: bool = True, beat: Beat | None = None) -> Row:
    """Run all checks of one family; arguments and result as of `checks.examine`."""
    say = beat or (lambda phase, **_: None)
    row = Row(model_type, "speech" if FAMILIES[model_type].shape else "text")
    torch.set_num_threads(1)
    try:
        say("building")
        model = model_of(model_type)
        say("eager")
        given = {"generate": inputs_of(model, model_type), "prompt": inputs_of(model, model_type, 9)}
        given["forward"] = inputs_of(model, model_type, _encoder_tokens(model, given["generate"]))
        wants = {name: generate(model, given[name])[0] for name in ("generate", "prompt")}
        wants["forward"] = _forward(model, given["forward"])
    except Exception as error:
        return eager_failed(row, error)
    made: list[PagedEncoderDecoderCache] = []

    def make_cache() -> PagedEncoderDecoderCache:
        made.append(PagedEncoderDecoderCache(model.config, len(_LENS), 32, block_size=4))
        return made[-1]

    runs: dict[str, Callable[[], Tensor]] = {
        "generate": lambda: generate(model, given["generate"], make_cache())[0],
        "prompt": lambda: generate(model, given["prompt"], make_cache())[0],
        "forward": lambda: _forward(model, given["forward"]),
    }
    run_checks(row, lambda: attach(model) is model, runs, wants, say)
    _judge(row, made)
    if compiled and row.mode in ("paged", "dense"):
        ours = (model, given["generate"], make_cache, wants["generate"], row)
        run_compiled(row, say, lambda: _compiled(*ours))
    return row


def _judge(row: Row, made: list[PagedEncoderDecoderCache]) -> None:
    if judge_bad(row, [outcome for outcome in row.checks.values() if outcome != "right"]):
        return
    own: Any = made[-1].self_attention_cache
    row.mode = "dense" if own.dense else "paged"
    if own.dense:
        row.reason = f"the decoder's own keys alone: {own.dense_reason}"


def _compiled(
    model: PreTrainedModel,
    given: dict[str, Tensor],
    make_cache: Callable[[], PagedEncoderDecoderCache],
    want: Tensor,
    row: Row,
) -> str:
    """The decode step of generate() as one graph."""
    with counted_graphs(row) as counter:
        got, _ = generate(model, given, make_cache(), **compiling(counter))
    return difference(got, want) if counter.frame_count else "error: nothing was compiled"
