"""The command line, ``torchpaged`` and ``python -m torchpaged``: typer and rich are imported when it runs."""

import signal


def main() -> None:
    """Run the command that ``sys.argv`` names."""
    from torchpaged.cli.app import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)  # the package left it to the system
    run()
