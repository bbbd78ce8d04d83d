"""The one exception of expected failures; bugs keep their own types and tracebacks."""


class RoutePackError(Exception):
    """Signal a failure that the caller can act on, in one line: what is wrong, the offending value, the way out."""
