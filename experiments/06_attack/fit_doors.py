"""The doors of measured times and of what is learned from them: measurements, journal, published tables, cost model."""

from __future__ import annotations

import io
import json
import shutil
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import arrays
import doors
import judge
import numpy as np
import operators as op
from hashes import file_sha256, rehash_costmodel

CELLS: tuple[Any, ...] = (
    None,
    float("nan"),
    float("inf"),
    -1.0,
    0.0,
    1e-300,
    1e300,
    -(2**40),
    2**62,
    "",
    "x",
    "nan",
    "ok",
    "forward",
    "attention",
    True,
    [],
    [1.0],
    {"a": 1},
)


def change_parquet(rng: op.Rng, path: Path) -> str:
    """Change a Parquet file: cells and columns, the metadata of ours, or bytes, most of them in the footer."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = rng.random()
    if kind < 0.3:
        data, said = op.change_bytes(rng, path.read_bytes(), tail=True)
        path.write_bytes(data)
        return f"{path.name}: {said}"
    table = pq.read_table(path)
    if kind < 0.55 and table.schema.metadata and b"routepack" in table.schema.metadata:
        meta = json.loads(table.schema.metadata[b"routepack"])
        said = op.change_tree(rng, meta)
        text = op.dumps_root(meta).encode("utf-8", "surrogatepass")
        if rng.random() < 0.1:
            text, said = op.change_bytes(rng, text)
        table = table.replace_schema_metadata({b"routepack": text})
    else:
        table, said = change_columns(rng, table)
    sink = pa.BufferOutputStream()
    try:
        pq.write_table(table, sink, compression=op.one_of(rng, ("zstd", "none", "gzip")))
    except (pa.ArrowException, ValueError, TypeError):
        pq.write_table(table.slice(0, 0), sink)
        said = "no rows"
    path.write_bytes(sink.getvalue().to_pybytes())
    return f"{path.name}: {said}"


def change_columns(rng: op.Rng, table: Any) -> tuple[Any, str]:
    """Change cells, the type, or the presence of a column; or the rows."""
    import pyarrow as pa

    at = int(rng.integers(table.num_columns))
    name, column = table.column_names[at], table.column(at).to_pylist()
    kind = op.one_of(rng, ("cell",) * 6 + ("type", "gone", "twice", "rename", "null", "rows", "no rows", "again"))
    if kind == "cell":
        value = op.one_of(rng, CELLS)
        if rng.random() < 0.4 and isinstance(column[0], (int, float)):
            value = op.one_of(rng, (-column[0], column[0] * 1e9, 0, -1))
        for place in rng.integers(0, len(column), int(op.one_of(rng, (1, 8, 200)))):
            column[place] = value
        try:
            return table.set_column(at, name, pa.array(column)), f"{name} = {value!r:.30}"
        except (pa.ArrowException, OverflowError, TypeError):
            return table.set_column(at, name, pa.array([str(one) for one in column])), f"{name} as text"
    if kind == "type":
        wanted = op.one_of(rng, ("text", "bytes", "list", "bool", "float", "date", "dictionary", "decimal"))
        made = {
            "text": lambda: pa.array([str(one) for one in column]),
            "bytes": lambda: pa.array([str(one).encode() for one in column]),
            "list": lambda: pa.array([[str(one)] for one in column]),
            "bool": lambda: pa.array([bool(one) for one in column]),
            "float": lambda: pa.array([0.5] * len(column)),
            "date": lambda: pa.array([0] * len(column), pa.timestamp("s")),
            "dictionary": lambda: pa.array([str(one) for one in column]).dictionary_encode(),
            "decimal": lambda: pa.array([1] * len(column), pa.int64()).cast(pa.decimal128(20, 0)),
        }
        return table.set_column(at, name, made[wanted]()), f"{name} as {wanted}"
    changed = {
        "gone": lambda: table.drop_columns([name]),
        "twice": lambda: table.append_column(name, table.column(at)),
        "rename": lambda: table.rename_columns([f"{n}_" if n == name else n for n in table.column_names]),
        "null": lambda: table.set_column(at, name, pa.nulls(len(column))),
        "rows": lambda: table.slice(0, int(op.one_of(rng, (1, 2, 5, 20)))),
        "no rows": lambda: table.slice(0, 0),
        "again": lambda: pa.concat_tables([table, table]),
    }
    return changed[kind](), f"{name}: {kind}"


# --- measurements ---


def mutate_measurements(rng: op.Rng, case: Path) -> str:
    """Change measurements or the journal of a profile."""
    if rng.random() < 0.3:
        return doors.change_lines(rng, case / "profile" / "cases.jsonl")
    return change_parquet(rng, case / "measurements" / "measurements.parquet")


def walk_measurements(case: Path) -> None:
    """Read the measurements and fit a cost model, or go on with the profile."""
    from profiler import Measurements

    path, journal = case / "measurements", case / "profile" / "cases.jsonl"
    if journal.read_bytes() != (doors.PRISTINE / "profile" / "cases.jsonl").read_bytes():
        walk_profile(case)
        return
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = Measurements.load(path)
        judge_fit([found], bool(said))


def walk_profile(case: Path) -> None:
    """Go on with a profile as far as it needs no device: its journal becomes measurements, which are fitted."""
    from profiler import Measurements
    from profiler.journal import Journal

    with Journal(case / "profile") as journal:
        pristine = json.loads((doors.PRISTINE / "profile" / "cases.jsonl").read_text().partition("\n")[0])
        journal.begin(pristine["header"])
        rows = [journal.rows[i] for i in sorted(journal.rows)]
        meta = {"schema_version": 2, "fingerprint": journal.header["fingerprints"][0], "model": None, "topology": None}
        meta |= {"params": {}, "provenance": {}, "backward": "measured", "dtype": journal.header["dtype"]}
        found = Measurements.from_rows(rows, meta)
    judge_rows(found, told=False)


def judge_rows(found: Any, told: bool) -> None:
    """Rows that are used hold positive times and sizes; others are left out only with a word about it."""
    rows = found.rows
    good = rows["status"] == "ok"
    times = np.asarray(rows["time_us"], float)[good]
    judge.holds(told or bool((np.isfinite(times) & (times > 0)).all()), "a useless time without a word")
    from profiler.cases.case import OPERATIONS

    for name, operation in OPERATIONS.items():
        mine = good & (rows["op"] == name)
        for feature in operation.features:
            least = min((int(one) for one in rows[feature][mine]), default=0)
            judge.holds(told or least >= 0, f"{name}: {feature} of {least}")


def judge_fit(found: list[Any], told: bool) -> None:
    """Fit a cost model and judge what it predicts, and a fingerprint that later verbs read."""
    from costmodels import fit_cost_model
    from profiler import DeviceFingerprint

    for one in found:
        judge_rows(one, told)
        judge_fingerprint(DeviceFingerprint.from_dict(one.meta["fingerprint"]))
    settings = doors.config()
    judge_cost_model(fit_cost_model(found, *settings.job, settings.fit))


def judge_fingerprint(found: Any) -> None:
    """A device's facts have their types."""
    for name, fact in type(found).__dataclass_fields__.items():
        value = getattr(found, name)
        right = judge.whole(value) if fact.type == "int" else isinstance(value, str if fact.type == "str" else dict)
        judge.holds(right, f"fingerprint.{name} = {value!r:.40}")


# --- published tables ---


def mutate_published(rng: op.Rng, case: Path) -> str:
    """Change a published table, Parquet or text, or the GPU's ``system.yaml``."""
    folder = case / "published"
    files = sorted(folder.rglob("*.parquet"))
    if rng.random() < 0.2:
        path = folder / "system.yaml"
        if rng.random() < 0.5:
            text, said = op.change_text(rng, path.read_text())
            path.write_bytes(text.encode("utf-8", "surrogatepass"))
            return f"system.yaml: {said}"
        import yaml

        tree = yaml.safe_load(path.read_text())
        said = op.change_tree(rng, tree)
        path.write_text(op.dumps_root(tree), errors="surrogatepass")
        return f"system.yaml: {said}"
    path = op.one_of(rng, files)
    if rng.random() < 0.3:  # as the package has it: text
        import pyarrow.csv as pc
        import pyarrow.parquet as pq

        sink = io.BytesIO()
        pc.write_csv(pq.read_table(path), sink)
        path.unlink()
        path = path.with_suffix(".txt")
        text, said = op.change_text(rng, sink.getvalue().decode())
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return f"{path.name}: {said}"
    return change_parquet(rng, path)


def walk_published(case: Path) -> None:
    """Import the tables and write the measurements."""
    from profiler import import_published

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = import_published(case / "published")
    judge_rows(found, bool(said))
    from profiler import DeviceFingerprint

    judge_fingerprint(DeviceFingerprint.from_dict(found.meta["fingerprint"]))
    found.save(case / "saved.parquet")


# --- the cost model's folder ---


def mutate_costmodel(rng: op.Rng, case: Path) -> str:
    """Change ``costmodel.json``, arrays of residuals, or LightGBM's text in them."""
    folder, kind = case / "costmodel", rng.random()
    if kind < 0.45:
        said = doors.change_json(rng, folder / "costmodel.json")
    else:
        path = op.one_of(rng, sorted((folder / "residuals").glob("*.npz")))
        if kind < 0.55:
            shutil.copy(op.one_of(rng, sorted((doors.PRISTINE / "other/costmodel/residuals").glob("*.npz"))), path)
            said = f"{path.name} of another model"
        elif kind < 0.8:
            said = change_trees(rng, path)
        else:
            said = doors.change_npz(rng, path)
    if rng.random() < 0.6 and rehash_costmodel_residuals(folder):
        said += " (hash right)"
    return said


def rehash_costmodel_residuals(folder: Path) -> bool:
    """Make the stored hashes of residuals right, whatever is in them."""
    if rehash_costmodel(folder):
        return True
    try:
        document = json.loads((folder / "costmodel.json").read_text())
        for entry in document["operations"].values():
            if "file" in entry:
                entry["sha256"] = file_sha256(folder / entry["file"])
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, OSError):
        return False
    (folder / "costmodel.json").write_text(json.dumps(document))
    return True


def change_trees(rng: op.Rng, path: Path) -> str:
    """Change the text of LightGBM models inside an archive: lines, numbers in them, their end."""
    found = judge.read_arrays(path)
    texts = [name for name, array in found.items() if array.dtype == np.uint8 and array.size]
    if not texts:
        return doors.change_npz(rng, path)
    name = op.one_of(rng, texts)
    lines = found[name].tobytes().decode().splitlines()
    kind = op.one_of(rng, ("number",) * 5 + ("line", "no line", "cut", "empty", "list", "value", "twice"))
    at = int(rng.integers(len(lines)))
    filled = [i for i, line in enumerate(lines) if "=" in line and any(c.isdigit() for c in line)]
    if filled and kind in ("number", "list", "value"):
        at = op.one_of(rng, filled)
    key, _, values = lines[at].partition("=")
    parts = values.split(" ")
    if kind == "number":
        new = str(
            op.one_of(
                rng, (-1, 0, 1, 5, 1000, 2**31 - 1, 2**31, -(2**31), 2**63, "nan", "inf", "1e308", "-1e308", "x", "")
            )
        )
        parts[int(rng.integers(len(parts)))] = new
        lines[at] = f"{key}={' '.join(parts)}"
        said = f"{key}: {new}"
    elif kind == "list":
        parts = parts[:-1] if rng.random() < 0.5 else parts * 2
        lines[at], said = f"{key}={' '.join(parts)}", f"{key}: {len(parts)} values"
    elif kind == "value":
        lines[at], said = f"{key}=", f"{key}: nothing"
    elif kind == "line":
        lines.insert(int(rng.integers(len(lines))), lines[at])
        said = f"line {at} twice"
    elif kind == "no line":
        said = f"line {lines.pop(at)[:30]!r} gone"
    elif kind == "cut":
        lines, said = lines[:at], f"cut after {at} lines"
    elif kind == "twice":
        lines, said = lines + lines, "twice"
    else:
        lines, said = [], "empty"
    found[name] = np.frombuffer(("\n".join(lines) + "\n").encode(), np.uint8)
    path.write_bytes(arrays.npz(found))
    return f"{path.name} {name}: {said}"


def walk_costmodel(case: Path) -> None:
    """Load the cost model, predict, and freeze tables."""
    from costmodels import CostModel

    found = CostModel.load(case / "costmodel")
    judge_fingerprint(found.fingerprint)
    judge.check_spec(found.spec)
    judge.check_topology(found.topology)
    judge_cost_model(found)


@cache
def grid() -> dict[str, dict[str, np.ndarray]]:
    """Return sizes of every operation that the unchanged job's measurements hold, and twice as large ones."""
    from profiler import Measurements
    from profiler.cases.case import OPERATIONS

    rows = Measurements.load(doors.PRISTINE / "measurements")
    found = {}
    for op_, operation in OPERATIONS.items():
        mine = rows.select(op=op_, direction="forward").rows
        if len(mine["case_id"]):
            found[op_] = {name: np.asarray(mine[name][::7], np.int64) for name in operation.features}
    return found


def judge_cost_model(found: Any) -> None:
    """What a cost model predicts is positive and finite, and so are the tables frozen from it."""
    from costmodels import freeze_tables

    for op_, features in grid().items():
        for direction in ("forward", "backward"):
            time_us, _ = found.predict_us(op_, direction, features)
            judge.holds(bool((np.isfinite(time_us) & (time_us > 0)).all()), f"{op_}: predicted {time_us.min()} us")
            judge.holds(bool((time_us < 1e12).all()), f"{op_}: predicted {time_us.max():.3g} us")
    settings = doors.config()
    made = freeze_tables(found, *settings.job)
    judge.check_tables(made, *settings.job)
