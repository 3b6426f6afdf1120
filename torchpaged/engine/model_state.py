"""ModelState: what of a model its graphs rely on, and whether it is still so.

A captured step replays kernels at the addresses of its weights, with the adapters that were active. A module
or a weight that was replaced since, or another adapter, would not be seen: silently wrong tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchpaged.custom_ops.errors import ArgumentError

#: What decides of a layer of the peft library which adapters run.
_ADAPTERS = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")


def _adapters(module: nn.Module) -> dict[str, str]:
    if not hasattr(module, "active_adapters") or not hasattr(module, "merged_adapters"):
        return {}
    return {name: repr(getattr(module, name, None)) for name in _ADAPTERS}


def _address(tensor: Tensor) -> int:
    # Subclasses (quantised ones) may have none; that they are the same objects says enough.
    return tensor.data_ptr() if type(tensor.data) is Tensor else 0


class ModelState:
    """The modules, weights and adapters of a model as they are now.

    Args:
        model: any module; what is none has no state that is known.
    """

    def __init__(self, model: Any) -> None:
        self._modules: list[tuple[str, dict[str, Any], list[tuple[str, Any]]]] = []
        self._tensors: list[tuple[str, dict[str, Any], str, Tensor, int]] = []
        self._adapted: list[tuple[str, nn.Module, dict[str, str]]] = []
        for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
            self._modules.append((path, module._modules, list(module._modules.items())))
            # Buffers that are not saved are the model's own business: some rotations replace theirs.
            passing = module._non_persistent_buffers_set
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is None or name in passing:
                        continue
                    where = f"{path}.{name}" if path else name
                    self._tensors.append((where, held, name, tensor, _address(tensor)))
            adapters = _adapters(module)
            if adapters:
                self._adapted.append((path, module, adapters))

    def changed(self) -> str | None:
        """What is not as it was, None if all is."""
        for path, held, before in self._modules:
            if len(held) != len(before) or any(held.get(name) is not child for name, child in before):
                return f"{path or 'the model'} has other parts"
        for where, tensors, name, tensor, address in self._tensors:
            if tensors.get(name) is not tensor or _address(tensor) != address:
                return f"{where} lies elsewhere"
        for path, module, adapters in self._adapted:
            for name, now in _adapters(module).items():
                if now != adapters.get(name):
                    return f"{path} has {name} {now}, before {adapters.get(name)}"
        return None

    def require_unchanged(self) -> None:
        """Refuse to replay graphs of what the model was.

        Raises:
            ArgumentError: with the first thing that is not as it was.
        """
        found = self.changed()
        if found is not None:
            raise ArgumentError(
                "model",
                "the modules, weights and adapters that its graphs were made with",
                found,
                "make a new Generator (unaccelerate and accelerate again), or give graphs=False, which looks "
                "at them at every step",
            )
