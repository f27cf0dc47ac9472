"""``python -m tandem``: the command line."""

from tandem.cli import main

if __name__ == "__main__":
    main()
