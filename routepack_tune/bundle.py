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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.errors import RoutePackError, explained
from profiler.extras import extras_named
from profiler.files import content_hash, file_hash, write_text
from profiler.places import check_place, new_folder, read_folder
from routepack_tune.job import Job, check_job
from routepack_tune.planner import Planner
from routepack_tune.progress import is_first_rank

if TYPE_CHECKING:
    from profiler import DeviceFingerprint, ModelSpec, Topology
    from routepack_tune.config import Config
    from search import PlannerParams

BUNDLE_SCHEMA_VERSION = 2
PLANNER_FILE = "planner.yaml"
TABLES_FILE = "tables.npz"
"""The three as in :mod:`routepack_tune.bundle_file`, which imports more than the command's help may wait for."""
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
            "dtype": planner.dtype,
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
def load_planner(
    path: Path | str,
    allow_mismatch: bool = False,
    warm_up: bool = True,
    job: Job | Mapping[str, Any] | None = None,
) -> Planner:
    """Load a bundle for the device of this process, ready to plan.

    Parameters
    ----------
    path
        The bundle's folder, or ``models:/NAME@ALIAS`` of MLflow's registry (this one form contacts a server).
    allow_mismatch
        Use a bundle tuned for another device, with a warning.
    warm_up
        Compile now what plans run (:meth:`Planner.warm_up`), not in the first training step.
    job
        What the running job knows of itself, whole or in part: compared as :meth:`Planner.check_job` does.

    Raises
    ------
    RoutePackError
        If a file is missing, was edited or contradicts another, the bundle is for another job, or for another device
        and ``allow_mismatch`` is False.
    """
    from routepack_tune.bundle_file import read_bundle

    folder, registered = bundle_folder(path)
    document, tables = read_folder(folder, lambda: read_bundle(folder))
    planner = Planner(
        spec=document.model,
        topology=document.topology,
        max_tokens=document.max_tokens_per_microbatch,
        params=document.params,
        tables=tables,
        fingerprint=document.fingerprint,
        dtype=document.dtype,
        provenance=document.provenance | ({"registry": registered} if registered else {}),
        bundle_hash=document.content_hash,
    )
    if job is not None:
        check_job(planner.planned_job, job, f"Bundle {path}")
    planner = replace(planner, notes=(*tables.notes, *_check_device(document.fingerprint, str(path), allow_mismatch)))
    if warm_up:
        planner.warm_up()
    return planner


def untuned_planner(costmodel: Path | str, settings: Config) -> Planner:
    """Return a planner with a cost model's times and the settings of ``routepack.yaml``."""
    from costmodels import tables_for
    from costmodels.cost_model import read_header

    tables = tables_for(costmodel, *settings.job)
    header = read_header(costmodel)
    return Planner(*settings.job, settings.planner, tables, header.fingerprint, dtype_of(header.provenance))


def dtype_of(provenance: Sequence[Any]) -> str:
    """Return the number type whose times a cost model learned; empty where its measurements do not say one."""
    told = {one.get("dtype") for one in provenance if isinstance(one, Mapping)}
    found = told.pop() if len(told) == 1 else ""
    return found if isinstance(found, str) else ""


def bundle_folder(path: Path | str) -> tuple[Path, dict[str, str]]:
    """Return a bundle's folder on this machine; one named ``models:/NAME@ALIAS`` is fetched first.

    Of that come name, version and alias at this moment too.
    """
    if str(path).startswith("models:/"):
        from routepack_tune.tracking.registry import download_bundle

        return download_bundle(str(path))
    if not Path(path).is_dir():
        raise RoutePackError(f"Bundle not found: {path}. Give the folder that `routepack deploy --out` wrote.")
    return Path(path), {}


def typed_parts(
    model: Mapping[str, Any], topology: Mapping[str, Any], params: Mapping[str, Any], source: str
) -> tuple[ModelSpec, Topology, PlannerParams]:
    """Rebuild what was written with ``asdict``; ``source`` names for an error where it was read."""
    from profiler import ModelSpec, Topology
    from profiler.params import check_sizes
    from profiler.readers import build
    from search import PlannerParams

    with explained(f"{source} cannot be used by this version: ", " Write it again."):
        spec, sizes = build(ModelSpec, model, "model"), build(Topology, topology, "topology")
        with explained(of=ValueError):
            check_sizes(spec, sizes)
        return spec, sizes, build(PlannerParams, params, "params")


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
