import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAVY = (
    "torch",
    "pyarrow",
    "pandas",
    "yaml",
    "scipy",
    "sklearn",
    "lightgbm",
    "optuna",
    "mlflow",
    "matplotlib",
    "numba",
)


def test_importing_the_profiler_is_light():
    code = f"import sys, profiler; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_torch_a_profile_says_what_to_install():
    code = "import sys; sys.modules['torch'] = None; from profiler import profile_device"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "RoutePackError: This needs torch" in done.stderr
    assert "pip install 'routepack-tune[profile]'" in done.stderr


def test_the_face_is_what_others_may_use():
    import profiler

    assert sorted(profiler.__all__) == [
        "DeviceFingerprint", "Match", "Measurements", "ModelSpec", "Observer", "ProfileParams", "RoutePackError",
        "SHIPPED_MODELS", "Topology", "compare_fingerprints", "fingerprint_device", "import_published", "load_model",
        "profile_device",
    ]  # fmt: skip
    assert all(hasattr(profiler, name) for name in profiler.__all__)
