"""Log a fitted cost model to MLflow: the model itself with signature and example, its errors, its pictures.

Where the configuration and ``MLFLOW_TRACKING_URI`` name no store, it is a SQLite file inside the cost model's folder.
The folder is complete before anything is sent; a failure to track is a warning.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler.errors import RoutePackError
from profiler.files import write_text
from profiler.redact import redacted
from routepack_tune.reports.fit import QUANTITIES, REPORT_FILE, error_lines, gains
from routepack_tune.tracking.database import ARTIFACTS
from routepack_tune.tracking.describe import ABOUT_COST_MODELS
from routepack_tune.tracking.registry import promote
from routepack_tune.tracking.store import DATABASE, KIND, NOTE, Store, log_pyfunc, what_mlflow_said

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

    from costmodels import CostModel

REGISTERED_PREFIX = "routepack-costmodel-"
PICTURES = "plots"
DATA = "routepack.data"
"""Tag of a fit: the hash of its measurements, by which the next one finds what a kill left RUNNING."""


def track_fit(model: CostModel, folder: Path | str, pictures: Mapping[str, str], uri: str, experiment: str) -> None:
    """Log the cost model in ``folder`` with its SVG pictures and register it; whatever fails becomes a warning."""
    try:
        _log(model, Path(folder), pictures, uri, experiment)
    except Exception as error:
        told = f"{type(error).__name__}: {what_mlflow_said(error, uri)}"
        where = redacted(uri)
        warnings.warn(
            f"MLflow at {where} could not log the cost model ({told}). It is whole in {folder}: run it again.",
            stacklevel=2,
        )


def _log(model: CostModel, folder: Path, pictures: Mapping[str, str], uri: str, experiment: str) -> None:
    store, name = Store(uri, experiment), REGISTERED_PREFIX + re.sub(r"[^\w.-]", "-", model.spec.name)
    client, example = store.client, input_example(model)
    from mlflow.models import infer_signature  # after the client: importing MLflow is quiet from there on

    for left in store.find(f"tags.`{KIND}` = 'fit' and tags.`{DATA}` = '{model.data_hash}'"):
        store.end(left, "KILLED")
    tags = {KIND: "fit", DATA: model.data_hash, NOTE: cost_model_note(model)}
    run_id = store.create_run(f"fit {model.spec.name}", tags)
    try:
        store.log(run_id, fit_facts(model), fit_metrics(model))
        with tempfile.TemporaryDirectory() as temporary:
            clean = Path(temporary) / "costmodel"
            # The default store lies in the same folder: it must not be logged into itself.
            shutil.copytree(folder, clean, ignore=shutil.ignore_patterns(f"{DATABASE}*", f".{DATABASE}*", ARTIFACTS))
            for picture, svg in pictures.items():
                write_text(Path(temporary) / PICTURES / f"{picture}.svg", svg)
            if pictures:
                client.log_artifacts(run_id, str(Path(temporary) / PICTURES), PICTURES)
            if (clean / REPORT_FILE).is_file():
                client.log_artifact(run_id, str(clean / REPORT_FILE))
            signature = infer_signature(example, predict_frame(model, example))
            how = {"signature": signature, "input_example": example}
            tags = {"model": model.spec.name, "device": model.fingerprint.name, "data": model.data_hash}
            version = log_pyfunc(
                store, run_id, "costmodel", "pyfunc_costmodel.py", clean, name, tags, cost_model_note(model), **how
            )
            promote(client, name, version, ABOUT_COST_MODELS)
    except BaseException:
        client.set_terminated(run_id, status="FAILED")
        raise
    client.set_terminated(run_id, status="FINISHED")


def cost_model_note(model: CostModel) -> str:
    """Return what the registered version says of itself."""
    device, timed = model.fingerprint, ", ".join(sorted({op for op, _ in model.models}))
    return (
        f"Cost model of RoutePack-Tune for {model.spec.name}: times of {timed} on {device.name}, learned from times "
        f"{device.origin} there. Its errors on sizes it had not seen are metrics of the run and in "
        "`costmodel-report.html`. `predict` takes `op`, `direction` and the operation's features by name."
    )


def fit_facts(model: CostModel) -> dict[str, Any]:
    """Return the parameters that the run shows."""
    return {
        "model": model.spec.name,
        **{name: size for name, size in dataclasses.asdict(model.topology).items() if size != 1},
        "max_tokens_per_microbatch": model.max_tokens,
        "device": model.fingerprint.name,
        "device_arch": model.fingerprint.arch,
        "origin": model.fingerprint.origin,
        "data_hash": model.data_hash,
        **{f"fit.{name}": value for name, value in dataclasses.asdict(model.params).items()},
        **{f"rows.{op}.{direction}": one.rows for (op, direction), one in model.models.items()},
        **{f"kind.{op}.{direction}": one.kind for (op, direction), one in model.models.items()},
    }


def fit_metrics(model: CostModel) -> dict[str, float]:
    """Return errors of every contestant per operation, direction and split, of the tables, and the trees' gains."""
    metrics: dict[str, float] = {}
    for line in error_lines(model.validation):
        where = f"{line['operation']}/{line['split']}/{line['contestant']}".replace(" ", "_")
        metrics |= {f"{where}/{name}": line[name] for name in QUANTITIES}
    for table, errors in model.table_errors.items():
        if isinstance(errors, Mapping):
            metrics |= {f"tables/{table}/{name}": float(value) for name, value in errors.items()}
    for (op, direction), one in model.models.items():
        metrics |= {f"{op}/{direction}/gain_pct/{name}": share for name, share in gains(one).items()}
    return metrics


def input_example(model: CostModel) -> pd.DataFrame:
    """Return one question per operation that was measured: sizes in the middle of a timed shape."""
    import pandas as pd

    features = dict.fromkeys(name for one in model.models.values() for name in one.operation.features)
    rows = []
    for (op, direction), one in model.models.items():
        shape, ranges = sorted(one.timed.items())[len(one.timed) // 2]
        asked = {name: float(value) for name, value in zip(one.operation.shape, shape, strict=True)}
        for name in one.operation.features:
            if name not in asked:
                low, high = ranges.get(name, (0.0, 0.0))
                asked[name] = float(np.rint(np.sqrt(low * high)))
        rows.append({"op": op, "direction": direction, **{name: asked.get(name, np.nan) for name in features}})
    return pd.DataFrame(rows)


def predict_frame(model: CostModel, asked: pd.DataFrame) -> pd.DataFrame:
    """Return ``time_us`` and ``extrapolated`` for rows of ``op``, ``direction`` and features, found by name."""
    import pandas as pd

    for name in ("op", "direction"):
        if name not in asked:
            raise RoutePackError(f"The input has no column {name!r}. Give op, direction and the operation's features.")
    known = {name for one in model.models.values() for name in one.operation.features}
    if unknown := sorted(set(asked.columns) - known - {"op", "direction"}):
        raise RoutePackError(f"Unknown columns {unknown}. Features are {sorted(known)}.")
    time_us, extrapolated = np.full(len(asked), np.nan), np.zeros(len(asked), dtype=bool)
    for (op, direction), rows in asked.groupby(["op", "direction"], sort=True).indices.items():
        part = asked.iloc[rows]
        # What is empty in every row of an operation is another operation's feature.
        features = {
            name: part[name].to_numpy(np.float64) for name in part if name in known and part[name].notna().any()
        }
        time_us[rows], extrapolated[rows] = model.predict_us(str(op), str(direction), features)
    return pd.DataFrame({"time_us": time_us, "extrapolated": extrapolated})
