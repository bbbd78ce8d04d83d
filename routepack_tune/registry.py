"""MLflow's model registry: a bundle as a model version under an alias, and back again."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from profiler.errors import RoutePackError
from routepack_tune.tracking import quiet_mlflow

ALIAS = "champion"


def register_bundle(bundle: Path | str, name: str, uri: str, run_id: str, experiment: str) -> str:
    """Log a bundle's folder with the study's run, register it and point the alias at it.

    Returns
    -------
    str
        ``models:/NAME@champion``.

    Raises
    ------
    RoutePackError
        If MLflow refuses or cannot be reached; the bundle itself stays where it is.
    """
    try:
        mlflow = quiet_mlflow()
        client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
        with tracking_at(mlflow, uri):
            mlflow.set_experiment(experiment)
            # MLflow announces every registration on stderr; the verb prints its own line.
            with contextlib.redirect_stderr(io.StringIO()), mlflow.start_run(run_id=run_id or None):
                logged = mlflow.pyfunc.log_model(
                    name="bundle",
                    python_model=str(Path(__file__).with_name("pyfunc_model.py")),
                    artifacts={"bundle": str(bundle)},
                    registered_model_name=name,
                    pip_requirements=["routepack-tune"],
                )
        client.set_registered_model_alias(name, ALIAS, logged.registered_model_version)
    except RoutePackError:
        raise
    except Exception as error:
        first = " ".join(str(error).split())[:300]
        raise RoutePackError(
            f"The bundle {bundle} is written, but MLflow could not register it as {name!r}: {first} Check the tracking "
            "server and run `routepack deploy` again."
        ) from None
    return f"models:/{name}@{ALIAS}"


def download_bundle(model_uri: str) -> Path:
    """Return the local folder of the bundle that ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION`` names."""
    mlflow = quiet_mlflow()
    try:
        folder = Path(mlflow.artifacts.download_artifacts(artifact_uri=model_uri))
    except Exception as error:
        first = " ".join(str(error).split())[:300]
        raise RoutePackError(f"{model_uri} cannot be had from {mlflow.get_tracking_uri()}: {first}") from None
    found = sorted(folder.glob("artifacts/*/planner.yaml"))
    if not found:
        raise RoutePackError(f"{model_uri} holds no bundle. Register one with `routepack deploy --register NAME`.")
    return found[0].parent


@contextlib.contextmanager
def tracking_at(mlflow: Any, uri: str) -> Iterator[None]:
    """Point MLflow's process-wide URIs at ``uri`` and put them back: callers have their own.

    MLflow also writes them into the environment, where later verbs of this process (and children) would read them.
    """
    names = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")
    before = {name: os.environ.get(name) for name in names}
    own = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    try:
        yield
    finally:
        # What the environment says needs no second place that would outlive a change of it.
        mlflow.set_tracking_uri(None if own == before[names[0]] else own)
        mlflow.set_registry_uri(None)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
