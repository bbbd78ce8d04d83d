"""Importing this fails in one line where a file or folder of the user's hides one of our packages."""

from importlib.util import find_spec
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]

for _name in ("profiler", "costmodels", "search"):
    _found = find_spec(_name)
    _origin = _found.origin if _found is not None else None
    if _origin is not None and Path(_origin).resolve().parent != HOME / _name:
        raise ImportError(
            f"routepack_tune needs its own package {_name!r}, but {_origin} hides it: it comes earlier on Python's "
            "path. Rename that file, or start from another folder."
        )
