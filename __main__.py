"""`python -m nearline`: the command line."""

from .workflows.cli import main

if __name__ == "__main__":
    main()
