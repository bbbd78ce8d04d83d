"""What reports upwards: long work calls an observer, floors above draw it."""


class Observer:
    """Receive the progress of long work on any floor; every method does nothing, override what you need."""

    def start(self, what: str, total: int) -> None:
        """Begin ``what``, which has ``total`` steps."""

    def now(self, what: str, message: str) -> None:
        """Say which step of ``what`` is running."""

    def advance(self, what: str, message: str = "") -> None:
        """Count one finished step of ``what``; ``message`` says how it went."""

    def finish(self, what: str) -> None:
        """End ``what``, complete or not."""
