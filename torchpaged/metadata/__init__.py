"""A batch of requests as tensors: `AttentionMetadata`, the table of its fields, and the slot arithmetic.

fields.py    every tensor of a batch: name, dtype, axes, padding
checks.py    what a batch of host lists must keep to
host.py      host numbers on their way to the device; where the token at a position lies
tree.py      trees of draft tokens as words of bits
batch.py     `AttentionMetadata`, of all these; `HostLengths`: its lengths where the host knows them
encoder.py   batches of encoders, and of cross attention
"""

from torchpaged.metadata.batch import AttentionMetadata, HostLengths
from torchpaged.metadata.encoder import encoder_metadata

__all__ = ["AttentionMetadata", "HostLengths", "encoder_metadata"]
