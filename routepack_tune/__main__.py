"""The command ``routepack``, also ``python -m routepack_tune``; it names the extra where packages are missing."""

import sys

from profiler.errors import RoutePackError
from profiler.extras import extras_named


def main() -> int:
    """Run the command line and return its exit code."""
    try:
        with extras_named():
            from routepack_tune.cli import main as run

            return run()
    except RoutePackError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
