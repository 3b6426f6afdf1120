"""``python -m torchpaged.bench.attention``."""

import sys

from torchpaged.bench.attention.run import main

sys.exit(main())
