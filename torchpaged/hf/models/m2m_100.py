"""M2M100's position embeddings, whose table grows with the cache's length."""

from typing import Any

import torch
from torch import Tensor

from torchpaged.hf.attached import plain_of
from torchpaged.hf.families import Family, Function, register_family


def _places_of_ids(module: Any) -> Function:
    """Position embeddings whose table grows with the cache's length, at which transformers 5.17 looks; here a
    position past the table raises."""
    plain = plain_of(module, "forward")

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_length: Any = 0,
    ) -> Tensor:
        traced = torch.compiler.is_compiling() and isinstance(past_length, Tensor)
        if not traced:
            return plain(self, input_ids, inputs_embeds, past_length)
        places = (
            self.create_position_ids_from_inputs_embeds(inputs_embeds, past_length, self.padding_idx)
            if input_ids is None
            else self.create_position_ids_from_input_ids(input_ids, self.padding_idx, past_length)
        )
        rows: Tensor = self.weights.index_select(0, places.flatten())
        return rows.view(*places.shape, -1).detach()

    return "forward", forward


register_family(Family(modules={"M2M100SinusoidalPositionalEmbedding": _places_of_ids}))
