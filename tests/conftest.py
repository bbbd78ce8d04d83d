"""Workers share tests by file, so that each file's fixtures are made once; kernels are kept by the text of them all.

numba knows a function's own file alone: a kernel whose callee in another file has changed would come from its cache as
it was. Processes that tests start inherit the folder.
"""

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
KERNELS = [path for room in ("costmodels", "search") for path in sorted((ROOT / room).rglob("*.py"))]
TEXT = b"".join(path.read_bytes() for path in KERNELS if b"@compiled" in path.read_bytes())
os.environ["NUMBA_CACHE_DIR"] = str(ROOT / ".pytest_cache" / "numba" / hashlib.sha256(TEXT).hexdigest()[:12])
# How fast examples run is the machine's business.
settings.register_profile("routepack", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("routepack")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Share tests by file where pytest-xdist runs them and nothing else was asked for."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist, config.option.loadscopereorder = "loadfile", False


def pytest_collection_modifyitems(items):
    """Put what takes longest first, so that no worker is left with it: one compiles while another starts processes."""
    first = ("packing/test_kernels.py", "ranks/test_ranks.py", "tracking/test_tracking.py", "study/test_study.py")
    items.sort(
        key=lambda item: next((k for k, name in enumerate(first) if item.nodeid.split("::")[0].endswith(name)), 9)
    )
