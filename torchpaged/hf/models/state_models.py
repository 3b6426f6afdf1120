"""Mamba, Mamba 2 and Falcon Mamba: models without attention, which ask for no masks. Up to transformers 5.23
they call their cache ``cache_params``.

Attached, they take a paged cache as ``past_key_values`` as well, by which that generate() knows what is
cached, cuts prompts into chunks and goes on behind them.
"""

from typing import Any

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from torchpaged.hf.attached import plain_of
from torchpaged.hf.cache_argument import CACHE, STATES_CACHE, cache_of, take_cache
from torchpaged.hf.families import Family, Function, Functions, register_family
from torchpaged.hf.models.mixers import mamba1, mamba2
from torchpaged.hf.owner import PagedOwner
from torchpaged.hf.packed_mixers import packed_functions, state_of_attached
from torchpaged.hf.row_refusals import require_left


def _forward(model: Any) -> Function:
    """Of a model without its head: it tells a paged cache the mask, which its mixers do not need then."""
    plain = plain_of(model, "forward")

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **options: Any,
    ) -> Any:
        cache = take_cache(options)
        options |= {"inputs_embeds": inputs_embeds, STATES_CACHE: cache}
        tokens = inputs_embeds if input_ids is None else input_ids
        if isinstance(cache, PagedOwner) and attention_mask is not None and tokens is not None:
            cache.see_mask(attention_mask, tokens)
            attention_mask = None
        return plain(self, input_ids, attention_mask=attention_mask, **options)

    return "forward", forward


def _of_causal_lm(model: Any) -> Functions:
    """Of a causal LM: its forward, and what generate() calls before each."""
    plain, prepare = plain_of(model, "forward"), plain_of(model, "prepare_inputs_for_generation")

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache_params: Any = None,
        past_key_values: Any = None,
        cache: Any = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> Any:
        options |= {"inputs_embeds": inputs_embeds, "logits_to_keep": logits_to_keep}
        cache = cache_of({"past_key_values": past_key_values, "cache_params": cache_params, "cache": cache})
        options[STATES_CACHE] = cache
        out = plain(self, input_ids, attention_mask=attention_mask, **options)
        if CACHE == STATES_CACHE or past_key_values is None or isinstance(out, tuple):
            return out
        return CausalLMOutputWithPast(out.loss, out.logits, past_key_values, out.hidden_states)

    def prepare_inputs_for_generation(
        self: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:  # by these names generate() knows what is taken
        kwargs["inputs_embeds"] = inputs_embeds
        require_left(kwargs, input_ids)
        inputs: dict[str, Any] = prepare(self, input_ids, attention_mask=attention_mask, **kwargs)
        cache = inputs.get(CACHE)
        if not isinstance(cache, PagedOwner) or cache.rows is None:
            return inputs
        inputs.pop("cache_params", None)  # generate() makes one where it finds none of this name
        tokens = inputs.get("input_ids")
        tokens = inputs["inputs_embeds"] if tokens is None else tokens
        cache.rows.require_room(tokens.shape[1])
        # transformers gives the mask with the first tokens alone, and padding may go on behind a chunk.
        may_pad = tokens.shape[1] > 1 or not cache.ready or cache.rows.cut_padding
        inputs["attention_mask"] = attention_mask if may_pad else None
        return inputs

    return ("forward", forward), ("prepare_inputs_for_generation", prepare_inputs_for_generation)


def _functions(model: Any) -> dict[Any, Function | Functions]:
    found: dict[Any, Function | Functions] = {**packed_functions(model)}
    if found:
        found[model.base_model] = _forward(model.base_model)
    if found and model.can_generate():
        found[model] = _of_causal_lm(model)
    return found


register_family(
    Family(
        ("mamba", "mamba2", "falcon_mamba"),
        states_alone=True,
        cache_argument=STATES_CACHE,
        packed={"MambaMixer": mamba1, "FalconMambaMixer": mamba1, "Mamba2Mixer": mamba2},
        functions=_functions,
        layer=state_of_attached,
    )
)
