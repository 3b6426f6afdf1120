"""A batch of requests as tensors: `AttentionMetadata`, the table of its fields, and the slot arithmetic.

fields.py    every tensor of a batch: name, dtype, axes, padding
slots.py     where the token at a position lies, on the host and on the device
checks.py    what a batch of host lists must keep to
host.py      host numbers on their way to the device
tree.py      trees of draft tokens as words of bits
batch.py     `AttentionMetadata`, of all these
encoder.py   batches of encoders, and of cross attention
"""

from torchpaged.metadata.batch import AttentionMetadata, HostLengths
from torchpaged.metadata.checks import check_batch, count, integers
from torchpaged.metadata.encoder import CrossMetadata, encoder_metadata
from torchpaged.metadata.fields import (
    FIELDS,
    METADATA_FIELDS,
    BatchField,
    BatchSizes,
    make_batch_tensors,
    pad_batch_tensors,
)
from torchpaged.metadata.host import host_block_table, to_device
from torchpaged.metadata.slots import slot_of, slots_at, slots_between
from torchpaged.metadata.tree import tree_mask_from_parents, tree_token_positions

__all__ = [
    "FIELDS",
    "METADATA_FIELDS",
    "AttentionMetadata",
    "BatchField",
    "BatchSizes",
    "CrossMetadata",
    "HostLengths",
    "check_batch",
    "count",
    "encoder_metadata",
    "host_block_table",
    "integers",
    "make_batch_tensors",
    "pad_batch_tensors",
    "slot_of",
    "slots_at",
    "slots_between",
    "to_device",
    "tree_mask_from_parents",
    "tree_token_positions",
]
