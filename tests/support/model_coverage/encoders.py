"""Encoders of transformers, tiny and random, under ``attn_implementation="torchpaged"`` and without a cache,
against transformers' own eager attention in float32.

Four checks, over the last hidden states of all positions that are no padding:

    even       a batch without padding
    right      rows padded on the right, by lengths of their own
    left       rows padded on the left; text alone
    compiled   ``right`` under ``fullgraph=True``, then with other lengths; counted in graphs
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MODEL_MAPPING, PreTrainedModel

from model_coverage.architectures import config_of, with_random_weights
from model_coverage.checks import (
    Beat,
    Row,
    counted_graphs,
    difference,
    eager_failed,
    judge_bad,
    outcome_of,
    run_compiled,
)

#: "varlen": every attention ran on our kernels; "dense": some on SDPA; "own attention": the modules attend by
#: themselves, as without torchpaged.
MODES = ("varlen", "dense", "own attention", "refused", "wrong", "broken", "unexamined")

_PIXELS: dict[str, Any] = {"image_size": 32, "patch_size": 8}
_WAVES: dict[str, Any] = {
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 2,
}


class Family(NamedTuple):
    """One family of encoders.

    Attributes:
        inputs: "text", "image" or "audio"; the name of the argument is the model's.
        options: of the config, over `architectures.SIZES`.
        part: the class to build, where it is not the one that transformers' `AutoModel` takes.
        shape: of an input that is no text, without its batch.
    """

    inputs: str = "text"
    options: Mapping[str, Any] = MappingProxyType({})
    part: str = ""
    shape: tuple[int, ...] = (3, 32, 32)


_IMAGE = Family("image", _PIXELS)
_WAVE = Family("audio", _WAVES, shape=(400,))
FAMILIES: dict[str, Family] = {
    "albert": Family(options={"embedding_size": 32}),
    "audio-spectrogram-transformer": Family(
        "image", {"patch_size": 8, "num_mel_bins": 16, "max_length": 64}, shape=(64, 16)
    ),
    "beit": _IMAGE,
    "bert": Family(),
    "bert-generation": Family(),
    "camembert": Family(),
    "clip_text_model": Family(options={"eos_token_id": 98}),
    "clip_vision_model": _IMAGE,
    "convbert": Family(options={"embedding_size": 64, "conv_kernel_size": 3, "head_ratio": 1}),
    "data2vec-audio": _WAVE,
    "data2vec-text": Family(),
    "data2vec-vision": _IMAGE,
    "deberta": Family(),
    "deberta-v2": Family(options={"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "deit": _IMAGE,
    "dinov2": _IMAGE,
    "dinov2_with_registers": _IMAGE,
    "dinov3_vit": _IMAGE,
    "distilbert": Family(),
    "electra": Family(options={"embedding_size": 64}),
    "ernie": Family(),
    "esm": Family(options={"mask_token_id": 4, "position_embedding_type": "rotary"}),
    "eurobert": Family(),
    "gte": Family(),
    "hubert": _WAVE,
    "ijepa": _IMAGE,
    "jina_embeddings_v3": Family(),
    "layoutlm": Family(),
    "megatron-bert": Family(),
    "mobilebert": Family(options={"intra_bottleneck_size": 64, "embedding_size": 64}),
    "modernbert": Family(
        options={"num_hidden_layers": 4, "global_attn_every_n_layers": 2, "local_attention": 8}
    ),
    "mpnet": Family(),
    "nomic_bert": Family(),
    "roberta": Family(),
    "roberta-prelayernorm": Family(),
    "roformer": Family(options={"embedding_size": 64}),
    "siglip_text_model": Family(part="SiglipTextModel"),
    "siglip_vision_model": _IMAGE,
    "splinter": Family(),
    "t5": Family(
        options={"d_kv": 16, "d_ff": 96, "num_heads": 4, "is_encoder_decoder": False}, part="T5EncoderModel"
    ),
    "unispeech": _WAVE,
    "videomae": Family("image", {**_PIXELS, "num_frames": 4}, shape=(4, 3, 32, 32)),
    "vit": _IMAGE,
    "vit_mae": Family("image", {**_PIXELS, "mask_ratio": 0.0}),
    "vit_msn": _IMAGE,
    "wav2vec2": _WAVE,
    "wavlm": _WAVE,
    "whisper": Family(
        "audio",
        {"num_mel_bins": 16, "max_source_positions": 32},
        "models.whisper.modeling_whisper.WhisperEncoder",
        (16, 64),
    ),
    "xlm-roberta": Family(),
    "xlm-roberta-xl": Family(),
    "xmod": Family(options={"languages": ["en"], "default_language": "en"}),
    "yolos": Family("image", {**_PIXELS, "image_size": [32, 32], "num_detection_tokens": 4}),
}


def model_types() -> list[str]:
    """The families that this transformers has, sorted."""
    from transformers import CONFIG_MAPPING

    return sorted(name for name in FAMILIES if name in CONFIG_MAPPING)


def model_of(model_type: str, implementation: str) -> PreTrainedModel:
    """The tiny encoder of a family, the same weights every time."""
    family = FAMILIES[model_type]
    config = config_of(model_type, dict(family.options))
    found: Any = MODEL_MAPPING.get(type(config), None)
    if family.part:
        found = _named(family.part)
    found = found[0] if isinstance(found, (tuple, list)) else found
    torch.manual_seed(0)
    return with_random_weights(
        found._from_config(config, dtype=torch.float32, attn_implementation=implementation)
    )


def _named(name: str) -> Any:
    """A class of transformers by its name, or by its path below it."""
    import importlib

    module, _, plain = name.rpartition(".")
    return getattr(importlib.import_module(f"transformers.{module}" if module else "transformers"), plain)


def inputs_of(
    model: PreTrainedModel, model_type: str, padding: str, lens: tuple[int, ...]
) -> dict[str, Tensor]:
    """A batch of ``len(lens)`` rows.

    Args:
        model: tells its input's name.
        model_type: of `FAMILIES`.
        padding: "even", "right" or "left".
        lens: of the rows' tokens, out of the longest.
    """
    family, rows = FAMILIES[model_type], len(lens)
    generator = torch.Generator().manual_seed(1)
    if family.inputs == "text":
        given = {"input_ids": torch.randint(5, 97, (rows, max(lens)), generator=generator)}
    else:
        given = {model.main_input_name: torch.randn(rows, *family.shape, generator=generator)}
    if padding == "even" or family.inputs == "image" or model_type == "whisper":
        return given
    size = given[model.main_input_name].shape[1]
    places = torch.arange(size)[None]
    counts = torch.tensor([size * n // max(lens) for n in lens])[:, None]
    mask = places < counts if padding == "right" else places >= size - counts
    if family.inputs == "text":
        given["input_ids"][~mask] = model.config.pad_token_id or 0
    return {**given, "attention_mask": mask.long()}


def hidden_states(model: Callable[..., Any], of: PreTrainedModel, given: dict[str, Tensor]) -> Tensor:
    """The last hidden states of all positions that are no padding, ``[tokens, hidden_size]``."""
    torch.manual_seed(0)  # some mask or shuffle what they are given
    with torch.no_grad():
        states: Tensor = model(**given)[0]
    mask = given.get("attention_mask")
    if mask is None:
        return states.flatten(0, 1)
    if mask.shape[1] != states.shape[1]:
        mask = of._get_feature_vector_attention_mask(states.shape[1], mask)
    return states[mask.bool()]


class Attended(TorchDispatchMode):
    """Counts the attentions inside: ``ours``, and ``sdpa`` of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = self.sdpa = 0

    def __enter__(self) -> Any:
        self._plain = torch.nn.functional.scaled_dot_product_attention

        def counted(*args: Any, **given: Any) -> Any:
            self.sdpa += 1
            return self._plain(*args, **given)

        torch.nn.functional.scaled_dot_product_attention = counted
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.nn.functional.scaled_dot_product_attention = self._plain
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ours += func.name().startswith("torchpaged::paged_attention")
        return func(*args, **(kwargs or {}))


_LENS = {"even": (20, 20), "right": (20, 13, 6), "left": (13, 20, 6), "again": (6, 20, 15)}


def examine(model_type: str, *, compiled: bool = True, beat: Beat | None = None) -> Row:
    """Run all checks of one family; arguments and result as of `checks.examine`."""
    say = beat or (lambda phase, **_: None)
    row = Row(model_type, FAMILIES[model_type].inputs)
    torch.set_num_threads(1)
    batches = ("even", "right", "left") if row.kind == "text" else ("even", "right")
    try:
        say("building")
        model = model_of(model_type, "eager")
        own = not type(model)._can_set_attn_implementation()
        given = {name: inputs_of(model, model_type, name, _LENS[name]) for name in batches}
        given["again"] = inputs_of(model, model_type, "right", _LENS["again"])
        say("eager")
        wants = {name: hidden_states(model, model, inputs) for name, inputs in given.items()}
    except Exception as error:
        return eager_failed(row, error)
    counts = Attended()
    for name in batches:
        say(name)

        def check(name: str = name) -> str:
            other = model_of(model_type, "torchpaged")
            with counts:
                got = hidden_states(other, other, given[name])
            return difference(got, wants[name], names_tokens=False)

        row.checks[name] = outcome_of(check)
    _judge(row, own, counts)
    if compiled and row.mode in MODES[:3]:
        run_compiled(row, say, lambda: _compiled(model_type, given, wants, row))
    return row


def _judge(row: Row, own: bool, counts: Attended) -> None:
    if judge_bad(row, [outcome for outcome in row.checks.values() if outcome != "right"]):
        return
    if own:
        row.mode, row.reason = "own attention", "does not call transformers' attention interface"
    elif counts.sdpa or not counts.ours:
        row.mode = "dense"
        row.reason = f"{counts.sdpa} of {counts.sdpa + counts.ours} attentions ran on SDPA"
    else:
        row.mode = "varlen"


def _compiled(model_type: str, given: dict[str, Any], wants: dict[str, Tensor], row: Row) -> str:
    model = model_of(model_type, "torchpaged")
    with counted_graphs(row) as counter:
        step = torch.compile(model, fullgraph=True, backend=counter)
        for name in ("right", "again"):
            said = difference(hidden_states(step, model, given[name]), wants[name], names_tokens=False)
            if said != "right":
                return said
    return "right"
