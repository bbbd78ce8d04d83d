import re

import numpy as np
import pytest

from profiler import DeviceFingerprint, Measurements, RoutePackError
from profiler.measurements import COLUMNS

DEVICE = DeviceFingerprint("cpu", "ours", "x86_64", "a name", 2, 4, "", 1)
META = {"fingerprint": DEVICE.to_dict(), "backward": "measured", "schema_version": 2}
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
    with pytest.raises(RoutePackError, match="cannot be read"):
        Measurements.load(path)
    path.write_bytes(b"not parquet")
    with pytest.raises(RoutePackError, match="cannot be read"):
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


@pytest.mark.parametrize("time_us", [np.nan, np.inf, 0.0, -5.0, 1e-300, 1e300])
def test_useless_times_are_refused_with_their_cases(tmp_path, time_us):
    measurements = Measurements.from_rows([{**ROWS[0], "time_us": time_us}, ROWS[1]], META)
    with pytest.raises(
        RoutePackError, match=rf"1 of 2 rows have a time_us .* {'0' * 16} dense {re.escape(str(time_us))}"
    ) as caught:
        Measurements.load(measurements.save(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("op", ["dense", "sorcery"], "op 'sorcery' is unknown"), ("direction", ["forward", "up"], "direction 'up'"),
        ("status", ["ok", "fine"], "status 'fine' is unknown"), ("tokens", [-1, 0], "a tokens that is not 0 to"),
        ("n", [2**60, 0], "a n that is not 0 to"), ("spread_us", [1e300, 0.0], "a spread_us"),
        ("case_id", [1, 2], "case_id is of the type int64, expected text"),
        ("op", [None, "dense"], "op has 1 rows without a value"), ("tokens", [7, None], "tokens has 1 rows without"),
        ("tokens", ["7", "0"], "tokens is of the type string, expected whole"),
        ("tokens", [7.5, 0.0], "tokens is of the type double, expected whole"),
        ("time_us", ["1.5", "2"], "time_us is of the type string"),
        ("time_us", [[1.5], [2.0]], "time_us is of the type"),
        ("time_us", [1.5, None], "time_us has 1 rows without"), ("repeats_us", [1.0, 2.0], "repeats_us is of the type"),
        ("repeats_us", [["1"], ["2"]], "repeats_us is of the type"), ("flag", [[""], [""]], "flag is of the type"),
    ],
)  # fmt: skip
def test_columns_of_another_type_or_range_are_named(measurements, tmp_path, name, values, words):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = measurements.save(tmp_path)
    table = pq.read_table(path)
    place = table.column_names.index(name)
    pq.write_table(table.set_column(place, name, pa.array(values)), path)
    with pytest.raises(RoutePackError, match=words) as caught:
        Measurements.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"fingerprint": None}, "fingerprint"), ({"fingerprint": []}, "fingerprint"), ({"fingerprint": {}}, "missing"),
        ({"fingerprint": {**DEVICE.to_dict(), "units": "2"}}, "units"),
        ({"fingerprint": {**DEVICE.to_dict(), "software": {"torch": 2}}}, "software"),
        ({"fingerprint": {**DEVICE.to_dict(), "ranks_per_node": True}}, "ranks_per_node"),
        ({"doubts": "none"}, "doubts"), ({"doubts": [1]}, "doubts"), ({"steadiness": {"problems": 3}}, "steadiness"),
        ({"steadiness": 3}, "steadiness"),
    ],
)  # fmt: skip
def test_what_they_say_of_themselves_is_checked(tmp_path, meta, words):
    path = Measurements.from_rows(ROWS, {**META, **meta}).save(tmp_path)
    with pytest.raises(RoutePackError, match=words) as caught:
        Measurements.load(path)
    assert "\n" not in str(caught.value)


def test_a_git_lfs_pointer_says_so(tmp_path):
    path = tmp_path / "measurements.parquet"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(RoutePackError, match=r"is a Git LFS pointer.*git lfs pull"):
        Measurements.load(path)
