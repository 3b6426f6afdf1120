"""The transformers model inside a wrapper of the ``peft`` library, whose adapters sit in its modules."""

from typing import Any

from transformers import PreTrainedModel

from torchpaged.custom_ops.errors import UnsupportedModelError


def unwrapped(model: Any) -> Any:
    """``model``, or if it is a ``PeftModel`` the transformers model in it: the adapters are in its modules,
    and whatever is active there runs. Known by the method ``get_base_model``; peft is not imported.

    Raises:
        UnsupportedModelError: its adapter is a learned prompt, which the wrapper alone puts in front of
            the inputs.
    """
    if isinstance(model, PreTrainedModel) or not callable(getattr(type(model), "get_base_model", None)):
        return model
    configs = getattr(model, "peft_config", {}).items()
    prompts = [name for name, config in configs if getattr(config, "is_prompt_learning", False)]
    if prompts:
        raise UnsupportedModelError(
            f"{type(model).__name__}: adapter {prompts[0]!r} is a learned prompt, which the wrapper puts in "
            "front of the inputs and torchpaged does not see; only adapters inside the modules (LoRA and its "
            "like) can be paged"
        )
    return model.get_base_model()
