"""`python -m cenote.cli.replay`: a replay's client, see `worker`."""

import sys

from .worker import main

if __name__ == "__main__":
    main(int(sys.argv[1]))
