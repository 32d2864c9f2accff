"""`python -m lrpfx`, which is the installed command too."""

import sys


def main() -> None:
    """Runs the command line; an interrupt is a message from the first import on."""
    try:
        from lrpfx.command_line.application import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted. What was written stays; the same command goes on from there", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
