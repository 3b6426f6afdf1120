"""Every decoder architecture of transformers, tiny and random, through a `PagedCache` against transformers'
own eager attention.

    rows = {row.model_type: row for row in cover(["llama", "bloom"], workers=2)}

``architectures`` builds the models, ``checks`` runs one, ``encoders`` and ``encoder_decoders`` do both for
theirs, ``vision_models`` and ``vision_language`` for those with images, ``kinds`` lists the four, ``sweep``
runs many in processes of their own, ``table`` keeps what came out and writes it down. ``torchpaged coverage``
is the command.
"""

from torchpaged.testing.coverage.checks import Row, examine
from torchpaged.testing.coverage.sweep import cover
from torchpaged.testing.coverage.table import Table, markdown

__all__ = ["Row", "Table", "cover", "examine", "markdown"]
