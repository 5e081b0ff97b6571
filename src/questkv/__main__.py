"""``python -m questkv``: the same as the ``questkv`` script."""

from questkv.cli.app import main

if __name__ == "__main__":
    main()
