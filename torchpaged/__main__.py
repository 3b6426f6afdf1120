"""``python -m torchpaged``: the command line."""

from torchpaged.cli import main

main()
