"""The one exception of expected failures; bugs keep their own types and tracebacks."""


class RoutePackError(Exception):
    """Signal a failure that the caller can act on.

    Whatever reads input, files or servers may raise it; only the functions that users call repeat so. The message is
    one line: what is wrong, the offending value, the way out. The command line prints it as ``Error: ...`` and exits
    non-zero.
    """
