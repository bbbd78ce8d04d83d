"""MLflow's model registry: a bundle as a model version under an alias, and back again.

Registering moves ``@champion`` to the new version and ``@previous`` to the old champion; rolling back exchanges them.
The champion always moves first: a kill in between leaves a champion, never none.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from profiler.errors import RoutePackError
from profiler.extras import extras_named
from routepack_tune.config import check_tracking_uri, without_password
from routepack_tune.tracking.store import KIND, SQLITE, Store, log_pyfunc, quiet_mlflow, what_mlflow_said

CHAMPION, PREVIOUS = "champion", "previous"


class RolledBack(NamedTuple):
    """The versions that are champion and previous now; no previous one where there was no champion."""

    champion: str
    previous: str


def register_bundle(bundle: Path | str, name: str, uri: str, run_id: str, experiment: str) -> None:
    """Log a bundle's folder with the study's run, register it and make it the champion."""
    try:
        store = Store(uri, experiment)
        run_id = run_id or store.create_run(f"bundle {name}", {KIND: "bundle"})
        version = log_pyfunc(store, run_id, "bundle", "pyfunc_planner.py", bundle, name, signature=planner_signature())
        promote(store.client, name, version)
    except Exception as error:
        raise RoutePackError(
            f"The bundle {bundle} is written, but MLflow could not register it as {name!r}: {what_mlflow_said(error)} "
            "Check the tracking server and run `routepack deploy` again."
        ) from None


def planner_signature() -> Any:
    """Return what the registered planner takes and gives, stated: nothing is left to inference from an example."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema
    from mlflow.types.schema import AnyType

    return ModelSignature(inputs=Schema([ColSpec(DataType.string)]), outputs=Schema([ColSpec(AnyType())]))


def promote(client: Any, name: str, version: str) -> None:
    """Make a version the champion; the champion so far becomes the previous one."""
    before = _version_of(client, name, CHAMPION)
    client.set_registered_model_alias(name, CHAMPION, version)
    if before and before != version:
        client.set_registered_model_alias(name, PREVIOUS, before)


@extras_named()
def rollback(name: str, tracking_uri: str | None = None) -> RolledBack:
    """Make the registered planner's earlier version the champion again; called twice, nothing has changed.

    Raises
    ------
    RoutePackError
        If no store is named, the store or the model is not there, or there is no earlier version.
    """
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "").strip()
    if not uri:
        raise RoutePackError(
            "No MLflow store is named. Give --tracking-uri or set MLFLOW_TRACKING_URI; a study's own store is "
            "sqlite:///STUDY/mlflow.db."
        )
    check_tracking_uri(uri)
    if uri.startswith(SQLITE) and not Path(uri.removeprefix(SQLITE)).is_file():
        raise RoutePackError(f"{uri} is no file: nothing was registered there. Give the store of the registry.")
    mlflow = quiet_mlflow()
    try:
        client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
        champion, previous = (_version_of(client, name, alias) for alias in (CHAMPION, PREVIOUS))
        if previous is None or previous == champion:
            known = sorted(int(one.version) for one in client.search_model_versions(f"name='{name}'"))
            versions = f"versions {', '.join(map(str, known))}" if known else "no version at all"
            raise RoutePackError(
                f"{name!r} in {without_password(uri)} has no version to go back to (@champion is "
                f"{champion or 'not set'}, @previous is {previous or 'not set'}, {versions}). Register one with "
                "`routepack deploy --register`."
            )
        client.set_registered_model_alias(name, CHAMPION, previous)
        if champion is not None:
            client.set_registered_model_alias(name, PREVIOUS, champion)
    except RoutePackError:
        raise
    except Exception as error:
        raise RoutePackError(
            f"MLflow at {without_password(uri)} could not roll back {name!r}: {what_mlflow_said(error)} Check the "
            "server and try again."
        ) from None
    return RolledBack(previous, champion or "")


def _version_of(client: Any, name: str, alias: str) -> str | None:
    """Return the version an alias points at; None where there is no such model or alias."""
    from mlflow.exceptions import MlflowException

    try:
        return str(client.get_model_version_by_alias(name, alias).version)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def download_bundle(model_uri: str) -> Path:
    """Return the local folder of the bundle that ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION`` names."""
    mlflow = quiet_mlflow()
    try:
        folder = Path(mlflow.artifacts.download_artifacts(artifact_uri=model_uri))
    except Exception as error:
        where = without_password(mlflow.get_tracking_uri())
        raise RoutePackError(f"{model_uri} cannot be had from {where}: {what_mlflow_said(error)}") from None
    found = sorted(folder.glob("artifacts/*/planner.yaml"))
    if not found:
        raise RoutePackError(f"{model_uri} holds no bundle. Register one with `routepack deploy --register NAME`.")
    return found[0].parent
