"""``python -m routepack_tune``: the same as the command ``routepack``."""

import sys

from routepack_tune.cli import main

if __name__ == "__main__":
    sys.exit(main())
