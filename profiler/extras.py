"""Packages that only some verbs need, and the extra of routepack-tune that brings each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec

from profiler.errors import RoutePackError

EXTRAS = {"torch": "profile", "pynvml": "nvidia", "cmaes": "cmaes", "psycopg": "postgresql", "ray": "ray"}
EXTRAS |= dict.fromkeys(
    ("filelock", "jinja2", "lightgbm", "markupsafe", "matplotlib", "mlflow", "optuna", "pandas", "pyarrow", "pydantic",
     "yaml", "rich", "sklearn", "scipy", "threadpoolctl", "typer"), "tune",
)  # fmt: skip
OURS = ("profiler", "costmodels", "search", "routepack_tune")


@contextlib.contextmanager
def extras_named() -> Iterator[None]:
    """Say which extra to install where a package that our own code imports is not installed.

    What an installed package fails to import stays the error that it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS or find_spec(package) is not None or _importer(error) not in OURS:
            raise
        raise RoutePackError(
            f"This needs {package}, which is not installed: pip install 'routepack-tune[{EXTRAS[package]}]'."
        ) from None


def _importer(error: BaseException) -> str:
    """Return the top-level package of the code whose import failed."""
    importer, trace = "", error.__traceback__
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        if not name.startswith("importlib"):
            importer = name.partition(".")[0]
        trace = trace.tb_next
    return importer
