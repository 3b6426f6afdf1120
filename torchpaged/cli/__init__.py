"""The command line, ``torchpaged`` and ``python -m torchpaged``: typer and rich are imported when it runs."""

from __future__ import annotations


def main() -> None:
    """Run the command that ``sys.argv`` names."""
    from torchpaged.cli.app import main as run

    run()
