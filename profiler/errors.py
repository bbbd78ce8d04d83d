"""The one exception of expected failures; bugs keep their own types and tracebacks."""

import contextlib
import re
from collections.abc import Iterator

from profiler.redact import redacted

_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class RoutePackError(Exception):
    """Signal a failure that the caller can act on.

    Whatever reads input, files or servers may raise it; only the functions that users call repeat so. The message is
    one line: what is wrong, the offending value, the way out. The command line prints it as ``Error: ...`` and exits
    non-zero. No message shows a secret of a URL, whoever wrote it; line breaks, control characters and halves of
    characters, which a file may put into it, are escaped.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(_UNSEEN.sub(lambda found: repr(found[0])[1:-1], redacted(message)))


@contextlib.contextmanager
def explained(before: str = "", after: str = "", of: type[Exception] = RoutePackError) -> Iterator[None]:
    """Say where an expected failure happened and what helps: the same error, with words around what it says."""
    try:
        yield
    except of as error:
        raise RoutePackError(f"{before}{error}{after}") from None
