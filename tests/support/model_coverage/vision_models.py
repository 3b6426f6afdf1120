"""Tiny random vision-language models and batches of pictures and text for them: float32, no downloads.

A config is built of the family's own parts, each of which takes of `architectures.SIZES` what it has fields
for. How many tokens a picture becomes is asked of the model.
"""

import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from model_coverage.architectures import OPTIONS, config_of_class, with_random_weights

#: What stands for a picture in a prompt; texts are of smaller ids.
IMAGE_TOKEN = 125
_IDS = {
    **dict.fromkeys(("image_token_id", "image_token_index", "image_patch_id"), IMAGE_TOKEN),
    **dict.fromkeys(("video_token_id", "video_token_index", "audio_token_id"), 124),
    **dict.fromkeys(
        ("vision_start_token_id", "image_start_token_id", "boi_token_id", "boi_token_index"), 123
    ),
    **dict.fromkeys(("vision_end_token_id", "image_end_token_id", "eoi_token_id", "eoi_token_index"), 122),
    "pad_token_id": 0,
}
_TOWER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "projection_dim", "out_hidden_size"), 64),
    **dict.fromkeys(("depth", "num_hidden_layers"), 2),
    **dict.fromkeys(("num_heads", "num_attention_heads"), 4),
    "intermediate_size": 96,
    "image_size": 16,
    "patch_size": 8,
}


class Family(NamedTuple):
    """One family.

    Attributes:
        pictures: their form, of `PICTURES`.
        text, vision: of those parts' configs, over `architectures.SIZES`.
        options: of the whole config.
        types: the argument that tells pictures from text, if there is one.
        picture_type, text_type: its values.
        model_type: transformers' name, where the family's is another.
        text_model: the type of the text part, where it is not the default one.
        vision_model: the type of the tower, where the family's config has none by default.
        tokens: of a picture, where the model does not tell.
    """

    pictures: str = "square"
    text: Mapping[str, Any] = MappingProxyType({})
    vision: Mapping[str, Any] = MappingProxyType({})
    options: Mapping[str, Any] = MappingProxyType({})
    types: str = ""
    picture_type: int = 1
    text_type: int = 0
    model_type: str = ""
    text_model: str = ""
    vision_model: str = ""
    tokens: int = 0


def _mrope(*sections: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [*sections]}}


_PATCHES = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_LLAVA: dict[str, Any] = {"vision_feature_layer": -1, "image_seq_length": 4}
_GRID: dict[str, Any] = {**_LLAVA, "image_grid_pinpoints": [[16, 16]]}
FAMILIES: dict[str, Family] = {
    "aya_vision": Family(text=OPTIONS["cohere2"], options={"downsample_factor": 1}),
    "blip-2": Family(options={"num_query_tokens": 4}),
    "cohere2_vision": Family(text=OPTIONS["cohere2"]),
    "exaone4_5": Family("patches", OPTIONS["exaone4"], _PATCHES),
    "gemma3": Family(
        text=OPTIONS["gemma3_text"],
        vision={"image_size": 32},
        options={"mm_tokens_per_image": 4},
        types="token_type_ids",
    ),
    "gemma4": Family(
        "positions",
        {**OPTIONS["gemma4_text"], "use_bidirectional_attention": "vision"},
        {**_TOWER, "patch_size": 4, "pooling_kernel_size": 2, "head_dim": 16, "num_key_value_heads": 4},
        types="mm_token_type_ids",
        vision_model="gemma4_vision",
    ),
    "glm4v": Family("patches", _mrope(3, 3, 2), _PATCHES, types="mm_token_type_ids"),
    "glm5_next": Family(
        "patches",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense"] * 2,
            "num_key_value_heads": 4,
            "qk_rope_head_dim": 0,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "index_head_dim": 16,
            "index_n_heads": 2,
            "index_kpool": 4,
        },
        _PATCHES,
    ),
    "got_ocr2": Family(),
    "hy_v4_vl": Family(
        "patches",
        {**OPTIONS["hy_v4"], **_mrope(3, 3, 2)},
        {"patch_size": 4, "max_image_size": 64},
        types="mm_token_type_ids",
    ),
    "idefics2": Family("tiles", {"sliding_window": 16}, {"patch_size": 8}),
    "idefics3": Family("tiles", options={"scale_factor": 1}),
    "internvl": Family(vision={"image_size": [16, 16], "patch_size": [4, 4]}),
    "lfm2_vl": Family("packed", OPTIONS["lfm2"], {"num_patches": 16}, {"downsample_factor": 2}),
    "lfm3_vl": Family(
        "patches", OPTIONS["lfm3"], {**_PATCHES, "num_key_value_heads": 4}, {"projector_hidden_size": 64}
    ),
    "lighton_ocr": Family("sized"),
    "llama4": Family(
        text=OPTIONS["llama4_text"],
        vision={
            "patch_size": 4,
            "vision_output_dim": 64,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
            "intermediate_size": 256,
        },
    ),
    "llava": Family(options=_LLAVA),
    "llava_next": Family("anyres", options=_GRID),
    "llava_onevision": Family("anyres", options=_GRID),
    "mistral3": Family("sized", {"sliding_window": 16}, {"patch_size": 4}, {"spatial_merge_size": 2}),
    "mistral_large4": Family("sized", OPTIONS["hy_v4"], {"patch_size": 4}, {"spatial_merge_size": 2}),
    "mllama": Family(
        "cross",
        tokens=1,
        text={"cross_attention_layers": [1], "num_hidden_layers": 3},
        vision={
            "num_global_layers": 1,
            "attention_heads": 4,
            "intermediate_layers_indices": [0],
            "vision_output_dim": 128,
            "max_num_tiles": 1,
            "supported_aspect_ratios": [[1, 1]],
        },
    ),
    "paligemma": Family(types="token_type_ids", picture_type=0, options={"projection_dim": 64}),
    "paligemma2": Family(
        text=OPTIONS["gemma2"],
        types="token_type_ids",
        picture_type=0,
        options={"projection_dim": 64},
        model_type="paligemma",
        text_model="gemma2",
    ),
    "qianfan_ocr": Family(),
    "qwen2_5_vl": Family(
        "patches",
        _mrope(2, 3, 3),
        {**_PATCHES, "window_size": 8, "fullatt_block_indexes": [1]},
        types="mm_token_type_ids",
    ),
    "qwen2_vl": Family("patches", _mrope(2, 3, 3), _PATCHES, types="mm_token_type_ids"),
    "qwen3_5": Family(
        "patches",
        {**OPTIONS["qwen3_5_text"]},
        {**_PATCHES, "num_position_embeddings": 16},
        types="mm_token_type_ids",
    ),
    "qwen3_vl": Family(
        "patches",
        _mrope(4, 2, 2),
        {**_PATCHES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        types="mm_token_type_ids",
    ),
    "qwen3_vl_moe": Family(
        "patches",
        _mrope(4, 2, 2),
        {**_PATCHES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        types="mm_token_type_ids",
    ),
    "qwen3_5_moe": Family(
        "patches",
        OPTIONS["qwen3_5_moe_text"],
        {**_PATCHES, "num_position_embeddings": 16},
        types="mm_token_type_ids",
    ),
    "smolvlm": Family("tiles", options={"scale_factor": 1}),
    "step3p7": Family(),
    "vipllava": Family(options={"vision_feature_layers": [-1, -1]}),
}
#: Not built here, and why.
LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(("gemma3n", "perception_lm", "fast_vlm"), "its tower is timm's"),
    **dict.fromkeys(("florence2", "pix2struct", "udop", "t5gemma2"), "an encoder-decoder"),
    "video_llava": "its images are frames of videos",
    "pi0": "its tokens are actions",
}


def model_types() -> list[str]:
    """The families that this transformers has, sorted."""
    return sorted(name for name, family in FAMILIES.items() if (family.model_type or name) in CONFIG_MAPPING)


def config_of(name: str) -> PretrainedConfig:
    """The tiny config of a family."""
    family = FAMILIES[name]
    config_class = CONFIG_MAPPING[family.model_type or name]
    default, given = config_class(), {}
    for part in getattr(config_class, "sub_configs", {}):
        own = getattr(default, part, None)
        if own is None and part == "vision_config" and family.vision_model:
            own = CONFIG_MAPPING[family.vision_model]()
        if own is None:
            continue
        if part == "text_config":
            kind = CONFIG_MAPPING[family.text_model] if family.text_model else type(own)
            made = config_of_class(kind, dict(family.text))
        else:
            made = config_of_class(
                type(own), {**_fields(own, _TOWER), **(family.vision if part == "vision_config" else {})}
            )
        given[part] = made.to_dict()
    return config_class(**{**_fields(default, _IDS), **given, **family.options})


def _fields(config: PretrainedConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if hasattr(config, name)}


def model_class_of(config: PretrainedConfig) -> Any:
    """The class of the models of a config."""
    found: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    return found[0] if isinstance(found, (tuple, list)) else found


def model_of(name: str, implementation: str | None = "eager") -> PreTrainedModel:
    """The tiny model of a family, the same weights every time."""
    config = config_of(name)
    found = model_class_of(config)
    torch.manual_seed(0)
    options = {} if implementation is None else {"attn_implementation": implementation}
    model = with_random_weights(found._from_config(config, dtype=torch.float32, **options))
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if part.endswith("_gate"):  # of cross attention: shut, where it is not trained
                parameter.fill_(0.5)
    return model


# ------------------------------------------------------------------------------------------------- pictures
def _square(count: int, config: Any) -> dict[str, Tensor]:
    size = config.vision_config.image_size
    return {"pixel_values": _noise(count, 3, *((size, size) if isinstance(size, int) else size))}


def _patches(count: int, config: Any) -> dict[str, Tensor]:
    vision = config.vision_config
    width = 3 * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    return {"pixel_values": _noise(count * 16, width), "image_grid_thw": torch.tensor([[1, 4, 4]] * count)}


def _sized(count: int, config: Any) -> dict[str, Tensor]:
    return {"pixel_values": _noise(count, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]] * count)}


def _anyres(count: int, config: Any) -> dict[str, Tensor]:
    return {"pixel_values": _noise(count, 2, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]] * count)}


def _packed(count: int, config: Any) -> dict[str, Tensor]:
    return {
        "pixel_values": _noise(count, 16, 3 * config.vision_config.patch_size**2),
        "spatial_shapes": torch.tensor([[4, 4]] * count),
        "pixel_attention_mask": torch.ones(count, 16, dtype=torch.int64),
    }


def _positions(count: int, config: Any) -> dict[str, Tensor]:
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(count, 16, 2)
    return {
        "pixel_values": _noise(count, 16, 3 * config.vision_config.patch_size**2),
        "image_position_ids": places.contiguous(),
    }


def _cross(count: int, config: Any) -> dict[str, Tensor]:
    return {
        "pixel_values": _noise(1, count, 1, 3, 16, 16),
        "aspect_ratio_ids": torch.ones(1, count, dtype=torch.int64),
        "aspect_ratio_mask": torch.ones(1, count, 1, dtype=torch.int64),
    }


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


#: form -> the arguments for so many pictures
PICTURES: dict[str, Any] = {
    "square": _square,
    "patches": _patches,
    "sized": _sized,
    "anyres": _anyres,
    "packed": _packed,
    "positions": _positions,
    "cross": _cross,
    "tiles": lambda count, config: {"pixel_values": _noise(1, count, 3, 16, 16)},
}


def picture_features(model: PreTrainedModel, name: str) -> Tensor:
    """What the model makes of one picture, ``[tokens, width]``."""
    given = PICTURES[FAMILIES[name].pictures](1, model.config)
    takes = inspect.signature(model.get_image_features).parameters
    for option in ("vision_feature_select_strategy", "vision_feature_layer"):
        if option in takes and takes[option].default is inspect.Parameter.empty:
            given[option] = getattr(model.config.vision_config, option)
    with torch.no_grad():
        found = model.get_image_features(**given)
    found = found if isinstance(found, (Tensor, tuple, list)) else _states(found)
    found = torch.cat(list(found)) if isinstance(found, (tuple, list)) else found
    return found.flatten(0, -2)


def _states(output: Any) -> Any:
    pooled = getattr(output, "pooler_output", None)
    return output.last_hidden_state if pooled is None else pooled


def tokens_per_picture(model: PreTrainedModel, name: str) -> int:
    """How many tokens stand for one picture."""
    return FAMILIES[name].tokens or picture_features(model, name).shape[0]


def batch_of(
    model: PreTrainedModel, name: str, rows: Sequence[str], tokens: int, seed: int = 1
) -> dict[str, Tensor]:
    """generate()'s arguments for rows of text and pictures, padded on the left.

    Args:
        rows: of each, "t" for three tokens of text and "i" for a picture.
        tokens: of a picture.
    """
    family, generator = FAMILIES[name], torch.Generator().manual_seed(seed)
    made = [
        torch.cat(
            [
                torch.full((tokens,), IMAGE_TOKEN)
                if part == "i"
                else torch.randint(3, 99, (3,), generator=generator)
                for part in row
            ]
        )
        for row in rows
    ]
    length = max(len(row) for row in made)
    ids = torch.stack([torch.nn.functional.pad(row, (length - len(row), 0)) for row in made])
    mask = torch.stack([torch.arange(length) >= length - len(row) for row in made]).long()
    given = {"input_ids": ids, "attention_mask": mask}
    if family.types:
        given[family.types] = torch.where(ids == IMAGE_TOKEN, family.picture_type, family.text_type)
    count = sum(row.count("i") for row in rows)
    pictures = PICTURES[family.pictures](count, model.config)
    if family.pictures not in ("tiles", "cross"):
        return given | pictures
    most = max(row.count("i") for row in rows)
    given |= {key: _of_rows(value[0], rows, most) for key, value in pictures.items()}
    if family.pictures == "cross":
        shown = (ids == IMAGE_TOKEN).cumsum(1) > torch.arange(most)[:, None, None]
        given["cross_attention_mask"] = shown.permute(1, 2, 0)[..., None].long()
    return given


def _of_rows(pictures: Tensor, rows: Sequence[str], most: int) -> Tensor:
    """``[pictures, ...]`` by rows, ``[rows, most, ...]``, and zeros where a row has fewer."""
    each, none = iter(pictures), torch.zeros_like(pictures[0])
    own = [[next(each) for _ in range(row.count("i"))] for row in rows]
    return torch.stack([torch.stack(some + [none] * (most - len(some))) for some in own])
