"""``python -m torchpaged.bench.tune``."""

import sys

from torchpaged.bench.tune.run import main

sys.exit(main())
