"""MLflow's model registry: a bundle as a model version under an alias, and back again.

Registering moves ``@champion`` to the new version and ``@previous`` to the old champion; rolling back exchanges them.
The champion always moves first: a kill in between leaves a champion, never none.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

from profiler.errors import RoutePackError
from profiler.extras import extras_named
from profiler.readers import read_json
from profiler.redact import redacted
from routepack_tune.config import check_tracking_uri
from routepack_tune.tracking.database import ARTIFACTS, beside_database, database_path, make_database
from routepack_tune.tracking.describe import ABOUT_PLANNERS, PLANNER_TAG, version_note, version_tags
from routepack_tune.tracking.store import (
    KIND,
    Store,
    is_cured_by_waiting,
    log_pyfunc,
    mlflow_errors,
    quiet_mlflow,
    what_mlflow_said,
)

CHAMPION, PREVIOUS = "champion", "previous"
PLANNER_FILE = "planner.yaml"
"""As in :mod:`routepack_tune.bundle`, which fetches bundles from here."""
_SHOWN = 10
"""Names shown of what is registered."""


class RolledBack(NamedTuple):
    """The versions that are champion and previous now; no previous one where there was no champion."""

    champion: str
    previous: str


def check_registered_name(name: str) -> None:
    """Refuse a name that a registry, its filters or the address ``models:/NAME@ALIAS`` cannot hold."""
    if not re.fullmatch(r"[\w.+-][\w .+-]{0,198}(?<! )", name) or not name.strip("."):
        raise RoutePackError(
            f"{name!r:.80} is no name for a planner. Use letters, digits, blanks inside, and . _ + - only, at most 200."
        )


def register_bundle(bundle: Path | str, name: str, uri: str, document: Mapping[str, Any]) -> str:
    """Register a bundle of the study that ``document`` describes and make it the champion; return what was done.

    A planner that the registry holds already, equal in all that plans depend on, keeps its version.
    """
    tracking, summary = document["tracking"], document["summary"]
    held = read_json(Path(bundle) / PLANNER_FILE, "Bundle file")
    try:
        store = Store(uri, tracking.get("experiment") or "routepack-tune")
        client, tags = store.client, version_tags(held, summary)
        run_id = _known_run(store, tracking.get("run_id", ""), tags[PLANNER_TAG])
        if version := _same_planner(client, name, tags[PLANNER_TAG]):
            was_champion = _version_of(client, name, CHAMPION) == version
            promote(client, name, version)
            moved = "stays the champion" if was_champion else "is the champion now"
            return f"Version {version} of {name} is this planner already: no version was added, it {moved}."
        run_id = run_id or store.create_run(f"bundle {name}", {KIND: "bundle", PLANNER_TAG: tags[PLANNER_TAG]})
        note, how = version_note(held, summary, name), {"signature": planner_signature()}
        version = log_pyfunc(store, run_id, "bundle", "pyfunc_planner.py", bundle, name, tags, note, **how)
        promote(client, name, version, ABOUT_PLANNERS)
    except mlflow_errors() as error:
        said = what_mlflow_said(error, uri).rstrip(".")
        when = "when it is back" if is_cured_by_waiting(error) else "with that mended or another MLFLOW_TRACKING_URI"
        raise RoutePackError(
            f"The bundle {bundle} is written, but MLflow at {redacted(uri)} could not register it as {name!r}: {said}. "
            f"Run `routepack deploy` again {when}."
        ) from None
    return f"Registered as version {version} of {name}, the champion now."


def _same_planner(client: Any, name: str, planner: str) -> str | None:
    """Return the latest version that plans alike; None where there is none."""
    found = client.search_model_versions(f"name={_quoted(name)} and tags.`{PLANNER_TAG}`='{planner}'")
    return max((str(one.version) for one in found), key=int, default=None)


def _quoted(name: str) -> str:
    """Return a name as MLflow's filters take it; those that hold both kinds of quotes it cannot be asked for."""
    return f'"{name}"' if "'" in name else f"'{name}'"


def _known_run(store: Store, run_id: str, planner: str) -> str:
    """Return the run that the bundle is logged with: the study's, one that a kill left over; empty if there is none."""
    from mlflow.exceptions import MlflowException

    found = store.find(f"tags.`{KIND}` = 'bundle' and tags.`{PLANNER_TAG}` = '{planner}'")
    with contextlib.suppress(MlflowException):
        if run_id and (run := store.client.get_run(run_id)).info.lifecycle_stage == "active":
            found = [run, *found]
    for run in found:
        store.end(run, "FINISHED")
    return str(found[0].info.run_id) if found else ""


def planner_signature() -> Any:
    """Return what the registered planner takes and gives, stated: nothing is left to inference from an example."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema
    from mlflow.types.schema import AnyType

    return ModelSignature(inputs=Schema([ColSpec(DataType.string)]), outputs=Schema([ColSpec(AnyType())]))


def promote(client: Any, name: str, version: str, about: str = "") -> None:
    """Make a version the champion; the champion so far becomes the previous one.

    A model that nobody has described is described by ``about``.
    """
    if about and not client.get_registered_model(name).description:
        client.update_registered_model(name, about)
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
    if (path := database_path(uri)) and not path.is_file():
        raise RoutePackError(f"{uri} is no file: nothing was registered there. Give the store of the registry.")
    try:
        client = Store(uri, "").client
        champion, previous = (_version_of(client, name, alias) for alias in (CHAMPION, PREVIOUS))
        if previous is None or previous == champion:
            raise RoutePackError(_no_way_back(client, name, redacted(uri), champion, previous))
        client.set_registered_model_alias(name, CHAMPION, previous)
        if champion is not None:
            client.set_registered_model_alias(name, PREVIOUS, champion)
    except mlflow_errors() as error:
        raise RoutePackError(
            f"MLflow at {redacted(uri)} could not roll back {name!r}: {what_mlflow_said(error, uri)} Check the "
            "server and try again."
        ) from None
    return RolledBack(previous, champion or "")


def _no_way_back(client: Any, name: str, store: str, champion: str | None, previous: str | None) -> str:
    """Say why a planner cannot be rolled back, and what is registered."""
    if name not in (names := _names(client)):
        return _unknown_name(name, names, store)
    return (
        f"{name!r} in {store} has no version to go back to (@champion is {champion or 'not set'}, @previous is "
        f"{previous or 'not set'}, {_told_versions(_versions(client, name))}). Register another planner with "
        "`routepack deploy --register`."
    )


def _names(client: Any) -> list[str]:
    """Return the names of all that is registered."""
    found, token = list[str](), None
    while page := client.search_registered_models(page_token=token):
        found += [one.name for one in page]
        if not (token := page.token):
            break
    return found


def _unknown_name(name: str, names: list[str], store: str) -> str:
    meant = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f"Did you mean {meant[0]!r}? " if meant else ""
    return f"{store} holds no planner {name!r}. {hint}Registered there: {_listed(names) or 'nothing'}."


def _versions(client: Any, name: str) -> list[int]:
    """Return the versions of a registered model, latest first; none where there is no such model."""
    return sorted((int(one.version) for one in client.search_model_versions(f"name={_quoted(name)}")), reverse=True)


def _told_versions(known: list[int]) -> str:
    return f"versions {_listed(list(map(str, known)))}" if known else "no version at all"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _version_of(client: Any, name: str, alias: str) -> str | None:
    """Return the version an alias points at; None where there is no such model or alias."""
    from mlflow.exceptions import MlflowException

    try:
        return str(client.get_model_version_by_alias(name, alias).version)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def download_bundle(model_uri: str) -> tuple[Path, dict[str, str]]:
    """Fetch the bundle that ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION`` names.

    Return its local folder, and ``name``, ``version`` and ``alias`` (empty without one) as they are now.
    """
    mlflow = quiet_mlflow()
    uris = mlflow.get_tracking_uri(), mlflow.get_registry_uri()
    if path := database_path(uris[1]):
        if not path.is_file():  # MLflow would make one here, on a machine that wants to read
            raise RoutePackError(
                f"{model_uri} cannot be had: {path} is no file, nothing was registered there. Set MLFLOW_TRACKING_URI "
                "to the registry's store."
            )
        make_database(path)
    try:
        client = mlflow.MlflowClient(*uris)
        known = _named_version(client, model_uri, redacted(uris[1]))
        place = client.get_model_version_download_uri(known["name"], known["version"])
        folder = _present(client, place, path, model_uri)
        folder = folder or Path(mlflow.artifacts.download_artifacts(f"models:/{known['name']}/{known['version']}"))
    except mlflow_errors() as error:
        said = what_mlflow_said(error, *uris)
        raise RoutePackError(f"{model_uri} cannot be had from {redacted(uris[1])}: {said}") from None
    found = sorted(folder.glob(f"artifacts/*/{PLANNER_FILE}"))
    if not found:
        raise RoutePackError(f"{model_uri} holds no bundle. Register one with `routepack deploy --register NAME`.")
    return found[0].parent, known


def _named_version(client: Any, model_uri: str, store: str) -> dict[str, str]:
    """Return name, version and alias of what a URI names; where there is no such thing, say what there is."""
    parts = re.fullmatch(r"models:/([^/]+)(?:@([^/@]+)|/(\d+))", model_uri)
    if parts is None:
        raise RoutePackError(f"{model_uri} names no planner. Give models:/NAME@ALIAS or models:/NAME/VERSION.")
    name, alias, version = (part or "" for part in parts.groups())
    if alias:
        found = _version_of(client, name, alias)
        if found is not None:
            return {"name": name, "version": found, "alias": alias}
    known = _versions(client, name)
    if version and int(version) in known:
        return {"name": name, "version": str(int(version)), "alias": ""}
    if not known and name not in (names := _names(client)):
        raise RoutePackError(f"{model_uri} cannot be had: {_unknown_name(name, names, store)}")
    aliases = client.get_registered_model(name).aliases
    wanted, there = (alias, sorted(aliases)) if alias else (version, list(map(str, known)))
    near = difflib.get_close_matches(wanted, there, n=1, cutoff=0.6) if alias else []
    hint = f"Did you mean models:/{name}@{near[0]}? " if near else ""
    told = ", ".join(f"@{one} (version {aliases[one]})" for one in sorted(aliases)) or "none"
    what = f"alias @{alias}" if alias else f"version {version}"
    raise RoutePackError(
        f"{model_uri} cannot be had: {name!r} in {store} has no {what}. {hint}Its aliases: {told}; it has "
        f"{_told_versions(known)}."
    )


def _present(client: Any, place: str, database: Path | None, model_uri: str) -> Path | None:
    """Return the folder of a version whose artifacts are files here; None where MLflow has to fetch them.

    A store that was moved or copied still names the old places: what lies beside its database is taken.
    """
    if place.startswith("models:/"):
        place = client.get_logged_model(place.removeprefix("models:/")).artifact_location
    if not place.startswith(("file:", "/")):
        return None
    there = Path(url2pathname(urlsplit(place).path))
    beside = beside_database(database, there) if database else None
    for folder in (beside, there):
        if folder and folder.is_dir():
            return folder
    raise RoutePackError(
        f"{model_uri} cannot be had: its files are missing, {there}. Where a store was moved, its folder {ARTIFACTS} "
        "goes beside its database; else register the bundle again with `routepack deploy --register`."
    )
