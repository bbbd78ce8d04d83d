import numpy as np
import pytest

from profiler import Measurements, RoutePackError
from profiler.measurements import COLUMNS

META = {"fingerprint": {"kind": "cpu"}, "backward": "measured", "schema_version": 2}
ROWS = [
    {"case_id": "0" * 16, "op": "dense", "direction": "forward", "status": "ok", "time_us": 1.5, "spread_us": 0.25,
     "repeats_us": [1.25, 1.5, 1.75], "source": "measured", "kernel": "mm", "dtype": "float32", "tokens": 7,
     "n": 2, "k": 3},
    {"case_id": "1" * 16, "op": "experts", "direction": "backward", "status": "oom", "message": "no memory", "rows": 9},
]  # fmt: skip


@pytest.fixture
def measurements():
    return Measurements.from_rows(ROWS, META)


def same(first, second):
    assert first.meta == second.meta
    assert list(first.rows) == list(second.rows) == list(COLUMNS)
    for name, column in first.rows.items():
        assert column.dtype.kind == second.rows[name].dtype.kind
        if name == "repeats_us":
            assert [list(x) for x in column] == [list(x) for x in second.rows[name]]
        else:
            np.testing.assert_array_equal(column, second.rows[name])


@pytest.mark.parametrize("name", ["folder", "mine.parquet"])
def test_saving_and_loading_changes_nothing(measurements, tmp_path, name):
    path = measurements.save(tmp_path / name)
    assert path.is_file()
    same(measurements, Measurements.load(tmp_path / name))


def test_no_rows_survive_too(tmp_path):
    empty = Measurements.from_rows([], META)
    empty.save(tmp_path)
    same(empty, Measurements.load(tmp_path))


def test_absent_values_are_zero_empty_or_not_a_number(measurements):
    assert measurements.rows["tokens"].tolist() == [7, 0]
    assert measurements.rows["flag"].tolist() == ["", ""]
    assert np.isnan(measurements.rows["time_us"][1])


def test_rows_are_selected_by_any_column(measurements):
    assert len(measurements.select(op="experts")) == 1
    assert len(measurements.select(status="ok", direction="forward", tokens=7)) == 1
    assert len(measurements.select(status="ok", op="experts")) == 0


def test_damaged_files_are_named(measurements, tmp_path):
    with pytest.raises(RoutePackError, match="not found"):
        Measurements.load(tmp_path)
    path = measurements.save(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RoutePackError, match="damaged"):
        Measurements.load(path)
    path.write_bytes(b"not parquet")
    with pytest.raises(RoutePackError, match="damaged"):
        Measurements.load(path)


def test_other_parquet_files_and_other_schemas_are_refused(measurements, tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(RoutePackError, match="not of measurements"):
        Measurements.load(tmp_path / "other.parquet")
    whole = pq.read_table(measurements.save(tmp_path))
    pq.write_table(whole.drop_columns(["time_us", "window"]), tmp_path / "measurements.parquet")
    with pytest.raises(RoutePackError, match="lack the columns time_us, window"):
        Measurements.load(tmp_path)
    for version in (1, 3):
        monkeypatch.setattr("profiler.measurements.SCHEMA_VERSION", version)
        path = measurements.save(tmp_path)
        monkeypatch.undo()
        with pytest.raises(RoutePackError, match=f"schema_version {version}, this version reads 2"):
            Measurements.load(path)
