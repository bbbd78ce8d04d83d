import json
import shutil
import warnings

import numpy as np
import pytest
from rank_jobs import MODEL, SMALL_FLUSH, SPEC, TOPOLOGY, profile, start_job, wait_for_rows

from profiler import Measurements, ModelSpec, Observer, ProfileParams, RoutePackError, profile_device
from profiler.journal import JOURNAL_NAME, Journal

pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture(scope="module", autouse=True)
def small_flush():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("profiler.device.backend.FLUSH_BYTES", {"cpu": SMALL_FLUSH})
        yield


def journal_lines(out):
    return [json.loads(line) for line in (out / JOURNAL_NAME).read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    return out, profile(out)


@pytest.fixture
def copy(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "copy")
    return tmp_path / "copy"


class Counter(Observer):
    def __init__(self):
        self.total, self.messages, self.open = 0, [], 0

    def start(self, what, total):
        self.total, self.open = total, self.open + 1

    def advance(self, what, message=""):
        self.messages.append(message)

    def finish(self, what):
        self.open -= 1


def test_a_sweep_times_every_operation_both_ways(finished):
    out, measurements = finished
    for op in ("attention", "dense", "experts"):
        forward, backward = (measurements.select(op=op, direction=d, status="ok") for d in ("forward", "backward"))
        assert len(forward) == len(backward) > 3
    rows = measurements.rows
    assert set(rows["source"]) == {"measured"}
    assert (rows["time_us"] > 0).all()
    assert all(len(samples) >= 1 for samples in rows["repeats_us"])
    assert (rows["kernel"] != "").all()
    meta = measurements.meta
    assert meta["backward"] == "measured"
    assert (meta["dtype"], meta["threads"]) == ("float32", 1)
    assert meta["fingerprint"]["kind"] == "cpu"
    assert len(meta["anchor"]["readings"]) >= 2
    assert ModelSpec(**{k: tuple(v) if isinstance(v, list) else v for k, v in meta["model"].items()}) == SPEC
    loaded = Measurements.load(out)
    np.testing.assert_array_equal(loaded.rows["time_us"], rows["time_us"])
    assert loaded.meta == json.loads(json.dumps(meta))


def test_a_finished_sweep_is_not_timed_again(copy):
    before = [line for line in journal_lines(copy) if "rows" in line]
    counter = Counter()
    again = profile(copy, observer=counter)
    after = [line for line in journal_lines(copy) if "rows" in line]
    # At most a second look at doubtful cases, never the whole again.
    assert after[: len(before)] == before
    assert set(counter.messages[: counter.total]) == {"done before"} or len(after) > len(before)
    assert counter.open == 0
    assert len(again) == len(Measurements.load(copy))


def test_a_killed_sweep_continues_and_loses_no_finished_case(tmp_path, finished):
    # FC-33: kill -9 in the middle, once more while a line is half written.
    out = tmp_path / "out"
    job = start_job(out)
    wait_for_rows(out, 3)
    job.kill()
    job.join()
    assert not (out / "measurements.parquet").exists()
    done = [line["rows"] for line in journal_lines(out) if "rows" in line]
    assert 3 <= len(done) < len(finished[1]) // 2
    with open(out / JOURNAL_NAME, "ab") as stream:
        stream.write(b'{"rows":[{"case_id":"0123')
    counter = Counter()
    measurements = profile(out, observer=counter)
    assert counter.messages.count("done before") == len(done)
    lines = [line["rows"] for line in journal_lines(out) if "rows" in line]
    assert lines[: len(done)] == done
    assert len(measurements) == 2 * len({rows[0]["case_id"] for rows in lines})
    # The same cases as an undisturbed sweep of a device this fast.
    assert set(finished[1].rows["case_id"]) == set(measurements.rows["case_id"])


def test_two_jobs_never_share_a_folder(tmp_path):
    with Journal(tmp_path), pytest.raises(RoutePackError, match="Another profile is writing to"):
        profile(tmp_path)
    with Journal(tmp_path):
        pass


def test_another_model_type_or_device_is_refused(copy):
    other = ModelSpec.from_config({**MODEL, "hidden_size": 64}, "small")
    with pytest.raises(RoutePackError, match="shape of the model differs"):
        profile(copy, spec=other)
    with pytest.raises(RoutePackError, match="dtype is bfloat16, expected float32"):
        profile(copy, dtype="bfloat16")
    lines = journal_lines(copy)
    lines[0]["header"]["fingerprints"][0]["software"]["torch"] = "1.0"
    (copy / JOURNAL_NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RoutePackError, match=r"torch is .*, expected 1\.0.*choose another --out"):
        profile(copy)


def test_a_refused_run_leaves_the_folder_as_it_was(copy):
    before = (copy / JOURNAL_NAME).read_bytes()
    with pytest.raises(RoutePackError):
        profile(copy, dtype="bfloat16")
    assert (copy / JOURNAL_NAME).read_bytes() == before


def test_damaged_lines_are_left_out_and_their_cases_timed_again(copy, finished):
    lines = (copy / JOURNAL_NAME).read_text().splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if line.startswith('{"rows"'))
    ids = [row["case_id"] for row in json.loads(lines[first])["rows"]]
    kept = [line for line in lines if ids[0] not in line]  # a case that was looked at again has several
    kept.insert(1, lines[first].replace('{"rows"', "{rows", 1))
    (copy / JOURNAL_NAME).write_text("".join(kept))
    with pytest.warns(UserWarning, match=r"cases.jsonl: line 2 cannot be read.*cases in it are timed again"):
        again = profile(copy)
    assert set(finished[1].rows["case_id"]) == set(again.rows["case_id"])
    assert set(again.select(case_id=ids[0]).rows["status"]) == {"ok"}


ROW = {"case_id": "a", "op": "dense", "direction": "forward", "status": "ok", "time_us": 2.0}
DAMAGED = [
    {}, {"rows": 3}, {"rows": [3]}, {"rows": [{}]}, {"rows": [{**ROW, "time_us": "2"}]}, {"sideways": 1},
    {"rows": [{**ROW, "time_us": 0.0}]}, {"rows": [{**ROW, "op": "x"}]}, {"rows": [{**ROW, "tokens": -1}]},
    {"rows": [{**ROW, "tokens": 1.5}]}, {"rows": [{**ROW, "repeats_us": ["1"]}]}, {"rows": [], "header": {}},
    {"header": {}}, {"header": 3}, {"anchor": {"case_id": "a"}}, {"session": []}, {"round": {"minutes": "1"}},
]  # fmt: skip


@pytest.mark.parametrize("line", ["null", "[]", "3", "{", "\xff", "[" * 5000, "9" * 6000, *map(json.dumps, DAMAGED)])
def test_a_line_of_any_other_content_is_left_out(finished, tmp_path, line):
    header = (finished[0] / JOURNAL_NAME).read_text().splitlines()[0]
    (tmp_path / JOURNAL_NAME).write_text(f"{line}\n{header}\n{json.dumps({'rows': [ROW]})}\n", encoding="latin-1")
    with pytest.warns(UserWarning, match=r"line 1.*left out") as caught:
        journal = Journal(tmp_path)
    with journal:
        assert journal.header["dtype"] == "float32"
        assert journal.rows == {"a": ROW}
    assert "\n" not in str(caught[0].message)


def test_without_its_header_a_journal_is_refused(copy):
    lines = (copy / JOURNAL_NAME).read_text().splitlines(keepends=True)
    damaged = [line.replace('"threads"', '"thread"') for line in lines]
    (copy / JOURNAL_NAME).write_text("".join(damaged))
    with pytest.raises(RoutePackError, match=r"no longer says which device and model .*choose another --out"):
        profile(copy)


def test_foreign_measurements_are_a_clear_error(copy):
    (copy / JOURNAL_NAME).unlink()
    with pytest.raises(RoutePackError, match="of other origin"):
        profile(copy)


def test_failed_cases_are_kept_and_retried_only_on_request(copy):
    lines = journal_lines(copy)
    failed = next(line for line in lines if "rows" in line)["rows"][0]["case_id"]
    for line in lines:  # a case that was looked at again has several
        if "rows" in line and line["rows"][0]["case_id"] == failed:
            for row in line["rows"]:
                row.update(status="unsupported", message="no such kernel")
                row.pop("time_us", None)
    (copy / JOURNAL_NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = profile(copy)
    assert kept.select(case_id=failed).rows["message"].tolist() == ["no such kernel"]
    assert np.isnan(kept.select(case_id=failed).rows["time_us"]).all()
    retried = profile(copy, retry_failed=True)
    assert retried.select(case_id=failed).rows["status"].tolist() == ["ok"]


def test_an_interrupt_keeps_what_is_finished_and_frees_the_folder(tmp_path):
    class Interrupt(Observer):
        left = 2

        def advance(self, what, message=""):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile(tmp_path, observer=Interrupt())
    assert len([line for line in journal_lines(tmp_path) if "rows" in line]) == 2
    with Journal(tmp_path) as journal:
        assert len(journal.rows) == 4


def test_an_unsteady_device_warns(copy):
    with pytest.warns(UserWarning, match="not steady"):
        profile(copy, max_drift=1e-6)
    # What else this machine does meanwhile may be said; the drift may not.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        profile(copy)
    assert not [warning for warning in caught if "left its median" in str(warning.message)]


def test_a_limit_that_was_too_tight_can_be_raised_in_the_same_folder(tmp_path):
    with pytest.raises(RoutePackError, match="max_memory_gib"):
        profile(tmp_path, max_memory_gib=1e-9)
    assert len(profile(tmp_path, max_memory_gib=1.0)) > 20


def test_a_cap_of_nothing_is_an_error(tmp_path):
    with pytest.raises(RoutePackError, match="at least 1"):
        profile_device(SPEC, TOPOLOGY, 0, ProfileParams(), tmp_path, "cpu")
