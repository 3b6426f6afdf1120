"""Every decoder architecture of transformers, tiny and random, through a `PagedCache` against transformers'
own eager attention.

    rows = {row.model_type: row for row in cover(["llama", "bloom"], workers=2)}

``architectures`` builds the models, ``checks`` runs one, ``encoders`` and ``encoder_decoders`` do both for
theirs, ``vision_models`` and ``vision_language`` for those with images, ``kinds`` lists the four, ``sweep``
runs many in processes of their own, ``table`` keeps what came out and writes it down.
``tests/support/cover_models.py`` is the command.
"""

from model_coverage.checks import Row, examine
from model_coverage.sweep import cover
from model_coverage.table import Table, markdown

__all__ = ["Row", "Table", "cover", "examine", "markdown"]
