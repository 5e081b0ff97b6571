"""``questkv`` and ``python -m questkv``: the command line, and what a Ctrl-C before it is there means."""

import sys


def main() -> None:
    """Run the command line; the entry point of the ``questkv`` script."""
    try:
        from questkv.cli.app import main as run

        run()
    except KeyboardInterrupt:  # while the command's own modules were imported, or just behind its end
        sys.exit(130)


if __name__ == "__main__":
    main()
