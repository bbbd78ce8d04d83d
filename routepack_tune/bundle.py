"""The bundle: all that a training job loads to plan its steps, in one folder of two files.

``planner.yaml`` is written in JSON syntax (which is YAML), so that training needs no YAML parser; ``tables.npz`` holds
the frozen times. Loading needs numpy and numba alone and contacts no server.

Invariants: a bundle is whole or absent; ``planner.yaml`` carries the hash of its own content and of ``tables.npz``;
file names never leave the folder.
"""

from __future__ import annotations

import json
import logging
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.errors import RoutePackError
from profiler.extras import extras_named
from profiler.files import check_place, content_hash, file_hash, new_folder, write_text
from profiler.readers import read_json
from routepack_tune.planner import Planner
from routepack_tune.progress import is_first_rank

if TYPE_CHECKING:
    from profiler import DeviceFingerprint, ModelSpec, Topology
    from routepack_tune.config import Config
    from search import PlannerParams

BUNDLE_SCHEMA_VERSION = 1
PLANNER_FILE = "planner.yaml"
TABLES_FILE = "tables.npz"
COST_MODEL_FILE = "costmodel.json"
"""As :data:`costmodels.COST_MODEL_FILE`; importing that takes longer than the command's help may."""
_LOG = logging.getLogger("routepack_tune")


def write_bundle(out: Path | str, planner: Planner, provenance: Mapping[str, Any]) -> Path:
    """Write a planner as a bundle folder, whole or not at all; an older bundle of that name is replaced."""
    out = Path(out)
    check_replaceable(out, PLANNER_FILE)
    with new_folder(out) as folder:
        planner.tables.save(folder / TABLES_FILE)
        document = {
            "schema_version": BUNDLE_SCHEMA_VERSION,
            "fingerprint": asdict(planner.fingerprint),
            "model": asdict(planner.spec),
            "topology": asdict(planner.topology),
            "max_tokens_per_microbatch": planner.max_tokens,
            "params": asdict(planner.params),
            "provenance": dict(provenance),
            "notes": list(planner.tables.notes),
            "tables_key": planner.tables.key,
            "files": {TABLES_FILE: file_hash(folder / TABLES_FILE)},
        }
        write_text(folder / PLANNER_FILE, json_that_is_yaml({**document, "content_hash": content_hash(document)}))
    return out


def json_that_is_yaml(document: Mapping[str, Any]) -> str:
    """Return indented JSON that YAML 1.1 parsers read alike: they take ``3e-06`` for text, ``3.0e-06`` for a number."""
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    return re.sub(r'^(\s*(?:"(?:[^"\\]|\\.)*": )?-?\d+)e([-+]?\d+,?)$', r"\1.0e\2", text, flags=re.MULTILINE)


def check_replaceable(out: Path | str, marker: str) -> None:
    """Refuse to replace a folder that was not written by the same verb: ``--out .`` must never delete anything."""
    check_place(out, folder=True)
    out, problem = Path(out), ""
    if Path.cwd().resolve().is_relative_to(out.resolve()):
        problem = "is the working folder or holds it: it is not replaced"
    elif out.is_dir() and any(out.iterdir()) and not (out / marker).is_file():
        problem = f"is not empty and holds no {marker}: it is not replaced"
    if problem:
        raise RoutePackError(f"{out} {problem}. Choose another --out.")


@extras_named()
def load_planner(path: Path | str, allow_mismatch: bool = False, warm_up: bool = True) -> Planner:
    """Load a bundle for the device of this process, ready to plan.

    Parameters
    ----------
    path
        The bundle's folder, or ``models:/NAME@ALIAS`` of MLflow's registry (this one form contacts a server).
    allow_mismatch
        Use a bundle tuned for another device, with a warning.
    warm_up
        Compile now what plans run (:meth:`Planner.warm_up`), not in the first training step.

    Raises
    ------
    RoutePackError
        If a file is missing, was edited, is of another schema, or the device differs and ``allow_mismatch`` is False.
    """
    from costmodels import StepTables, tables_key
    from profiler import DeviceFingerprint

    folder = bundle_folder(path)
    document = _read_document(folder)
    tables = StepTables.load(folder / TABLES_FILE)
    parts, cap = (document["model"], document["topology"], document["params"]), document["max_tokens_per_microbatch"]
    spec, topology, params = typed_parts(*parts, f"Bundle {folder}")
    if not tables.key == document["tables_key"] == tables_key(spec, topology, cap):
        raise RoutePackError(
            f"Bundle {folder}: its tables are for another model, topology or cap. Run `routepack fit`, `tune` and "
            "`deploy` again."
        )
    wanted = DeviceFingerprint.from_dict(document["fingerprint"])
    notes = _check_device(wanted, str(path), allow_mismatch)
    planner = Planner(spec, topology, cap, params, tables, wanted, document["provenance"], (*tables.notes, *notes))
    if warm_up:
        planner.warm_up()
    return planner


def untuned_planner(costmodel: Path | str, settings: Config) -> Planner:
    """Return a planner with a cost model's times and the settings of ``routepack.yaml``."""
    from costmodels import tables_for
    from profiler import DeviceFingerprint

    tables = tables_for(costmodel, *settings.job)
    device = DeviceFingerprint.from_dict(cost_model_header(costmodel)["fingerprint"])
    return Planner(*settings.job, settings.planner, tables, device)


def cost_model_header(costmodel: Path | str) -> dict[str, Any]:
    """Return what ``costmodel.json`` says of device, data and errors."""
    from costmodels.cost_model import cost_model_folder

    header = read_json(cost_model_folder(costmodel) / COST_MODEL_FILE, "Cost model")
    if not isinstance(header, dict) or "fingerprint" not in header:
        raise RoutePackError(f"Cost model {costmodel} names no device. Run `routepack fit` again.")
    return header


def bundle_folder(path: Path | str) -> Path:
    """Return a bundle's folder on this machine; one named ``models:/NAME@ALIAS`` is fetched first."""
    if str(path).startswith("models:/"):
        from routepack_tune.tracking.registry import download_bundle

        return download_bundle(str(path))[0]
    if not Path(path).is_dir():
        raise RoutePackError(f"Bundle not found: {path}. Give the folder that `routepack deploy --out` wrote.")
    return Path(path)


def _read_document(folder: Path) -> dict[str, Any]:
    """Read ``planner.yaml``; check its schema, its own hash and that of the one file it names."""
    path, tables = folder / PLANNER_FILE, folder / TABLES_FILE
    if not path.is_file():
        raise RoutePackError(
            f"{folder} is no bundle: it has no {PLANNER_FILE}. Give the folder that `routepack deploy` wrote."
        )
    found = read_json(path, "Bundle file")
    document = found if isinstance(found, dict) else {}
    version, stated = document.get("schema_version"), document.pop("content_hash", None)
    if version != BUNDLE_SCHEMA_VERSION:
        problem = f"it has schema_version {version!r}, this version reads {BUNDLE_SCHEMA_VERSION}."
    elif content_hash(document) != stated:
        problem = f"{PLANNER_FILE} does not match its content_hash: it was edited. Change routepack.yaml instead."
    elif not tables.is_file() or document.get("files") != {TABLES_FILE: file_hash(tables)}:
        problem = f"{TABLES_FILE} is missing, or does not match its hash in {PLANNER_FILE}: no other file is read."
    else:
        return document
    raise RoutePackError(f"Bundle {folder}: {problem} Run `routepack deploy` again.")


def typed_parts(
    model: Mapping[str, Any], topology: Mapping[str, Any], params: Mapping[str, Any], source: str
) -> tuple[ModelSpec, Topology, PlannerParams]:
    """Rebuild what was written with ``asdict``; ``source`` names for an error where it was read."""
    from profiler import ModelSpec, Topology
    from profiler.params import check_sizes
    from search import PlannerParams

    try:
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in model.items()}
        spec, sizes = ModelSpec(**fields), Topology(**topology)
        check_sizes(spec, sizes)
        return spec, sizes, PlannerParams(**params)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RoutePackError(f"{source} cannot be used by this version: {error}. Write it again.") from None


def device_match(wanted: DeviceFingerprint) -> tuple[str, str]:
    """Compare a device with this host's of that kind.

    Return ``exact``, ``near``, ``different`` or, where there is none or torch cannot see it, ``unknown``; and what a
    reader should know, empty where it is exact.
    """
    from profiler import compare_fingerprints, fingerprint_device

    # Unlike asking for "cuda", asking for any device imports torch only where there is a driver.
    here = fingerprint_device(None if wanted.kind == "cuda" else wanted.kind)
    if here.kind != wanted.kind:
        said = f"times were {wanted.origin} on {wanted.name} ({wanted.arch}); this host has no GPU to compare with"
        return "unknown", said
    match = compare_fingerprints(wanted, here)
    level = "near" if match.level == "exact" and wanted.origin == "published" else match.level
    reasons = "; ".join(match.reasons) or "published times"
    return level, "" if level == "exact" else f"device is {level} from the profiled one: {reasons}"


def _check_device(wanted: DeviceFingerprint, path: str, allow_mismatch: bool) -> tuple[str, ...]:
    """Compare the bundle's device with this one, once a host; return what a reader should know."""
    if os.environ.get("LOCAL_RANK", "0") != "0":  # local rank 0 compares for its host, and its error ends the job
        return ()
    level, note = device_match(wanted)
    if level == "different" and not allow_mismatch:
        raise RoutePackError(
            f"Bundle {path} is for another device ({wanted.name}, {wanted.arch}): {note}. Profile, fit and tune on "
            "this device, or force it with allow_mismatch=True (--allow-mismatch)."
        )
    if level == "unknown" and is_first_rank():
        _LOG.info("Bundle %s: %s.", path, note)
    elif note and is_first_rank():
        warnings.warn(f"Bundle {path}: {note}.", stacklevel=3)
    return (note,) if note else ()
