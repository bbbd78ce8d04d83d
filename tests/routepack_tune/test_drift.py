"""Does a bundle still fit? Batches and step times are synthetic: planted shifts, factors and noise."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, replace

import numpy as np
import pytest

from profiler import RoutePackError
from routepack_tune import deploy, load_planner, load_step_batch
from routepack_tune.bundle import untuned_planner, write_bundle
from routepack_tune.cli import main
from routepack_tune.drift import _block_seconds, check, median_interval, trend_interval
from routepack_tune.planner import Planner
from routepack_tune.steps.generator import WorkloadParams, make_step_batch
from routepack_tune.steps.traces import save_step_batch
from routepack_tune.steps.workload import compare_workloads, workload_statistics
from routepack_tune.summaries import drift_summary
from search import build_problem, evaluate

WORKLOAD = WorkloadParams(num_prompts=5, rollouts=4, median_tokens=60, sigma=0.6, max_tokens=256)
HALF = {"attention": 0.08, "experts": 0.08, "exchange": 0.08}


@pytest.fixture
def planner(job):
    return untuned_planner(job.costmodel, job.settings())


def write_steps(folder, planner, workload=WORKLOAD, first=10, count=4):
    for step in range(first, first + count):
        save_step_batch(folder / f"recent{step:02d}.npz", make_step_batch(planner.spec, workload, step=step))
    return folder


@pytest.fixture
def bundle(job, planner):
    """A bundle that knows its tuning batches and holds the untuned settings."""
    batches = [make_step_batch(planner.spec, WORKLOAD, step=step) for step in range(8)]
    provenance = {
        "workload": workload_statistics([f"s{i}" for i in range(8)], batches),
        "cost_model": {"half_log": HALF}, "default_params": asdict(planner.params), "hidden_planning_s": 3600.0,
    }  # fmt: skip
    return write_bundle(job.folder / "bundle", planner, provenance)


def write_times(path, planner, steps, factors, noise=0.01, plans=False):
    """Write step times in which factors on the components hide; return the file."""
    rng, rows = np.random.default_rng(0), []
    for file in sorted(steps.glob("*.npz")):
        batch = load_step_batch(file, planner.spec)
        plan = planner.plan(batch, seed=5 if plans else 0)
        seconds = (_block_seconds(planner, batch, plan) @ factors).max() * np.exp(noise * rng.standard_normal())
        row = {"step": file.stem, "step_time_s": f"{seconds:.9g}"}
        if plans:
            plan.save(path.parent / f"{file.stem}.plan.json")
            row["plan"] = f"{file.stem}.plan.json"
        rows.append(row)
    path.write_text("\n".join([",".join(rows[0]), *(",".join(row.values()) for row in rows)]) + "\n")
    return path


def found(report, name):
    return next((one for one in report.findings if one.name == name), None)


def test_unchanged_workload_fits(job, planner, bundle):
    steps = write_steps(job.folder / "recent", planner, count=6)
    times = write_times(job.folder / "times.csv", planner, steps, np.ones(4))
    report = check(bundle, steps, times, out=job.folder / "report.json")
    assert report.verdict == "fits"
    prediction = found(report, "step time").numbers
    assert abs(prediction["median_pct"]) < 2
    assert prediction["allowed_is"] == "stated"
    assert json.loads((job.folder / "report.json").read_text())["verdict"] == "fits"
    assert drift_summary(report, None).splitlines()[0] == "Verdict: fits"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"median_tokens": 180.0, "sigma": 0.3}, "lengths"),
        ({"base_sd": 2.0, "domain_sd": 1.0}, "effective experts"),
        ({"num_prompts": 20}, "tokens a step"),
    ],
)
def test_shifted_workload_asks_to_tune_again(job, planner, bundle, change, named):
    report = check(bundle, write_steps(job.folder / "recent", planner, replace(WORKLOAD, **change)))
    assert report.verdict == "re-tune"
    assert found(report, named).beyond
    assert named in drift_summary(report, None).splitlines()[0]


def test_false_alarms_are_rare(planner):
    alarms = 0
    for seed in range(20):
        batches = [make_step_batch(planner.spec, WORKLOAD, seed=seed, step=step) for step in range(10)]
        tuned, recent = (workload_statistics(["b"] * len(part), part) for part in (batches[:7], batches[7:]))
        alarms += any(distance > limit for _, distance, limit in compare_workloads(tuned, recent).values())
    assert alarms <= 2


def test_slower_device_asks_to_profile_again(job, planner, bundle):
    steps = write_steps(job.folder / "recent", planner, count=6)
    times = write_times(job.folder / "times.csv", planner, steps, 1.3 * np.ones(4), plans=True)
    report = check(bundle, steps, times)
    assert report.verdict == "re-profile"
    assert found(report, "step time").numbers["median_pct"] == pytest.approx(30, abs=3)
    assert not any("planned again" in note for note in report.notes)
    few = times.read_text().splitlines()[:4]
    times.write_text("\n".join(few))
    report = check(bundle, steps, times)
    assert report.verdict == "fits"
    assert any("too few" in note for note in report.notes)


def test_another_device_asks_to_profile_again(job, planner):
    other = replace(planner, fingerprint=replace(planner.fingerprint, arch="other"))
    bundle = write_bundle(job.folder / "other", other, {"default_params": asdict(planner.params)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = check(bundle, job.steps)
    assert report.verdict == "re-profile"
    assert "arch is" in found(report, "device").text


def test_tuned_settings_that_lose_ask_to_tune_again(job, planner):
    weak = replace(planner, params=replace(planner.params, max_iterations=1, placement_swaps=0, extra_rows=0))
    strong = {**asdict(planner.params), "max_iterations": 20_000}
    bundle = write_bundle(job.folder / "weak", weak, {"default_params": strong, "hidden_planning_s": 3600.0})
    report = check(bundle, write_steps(job.folder / "recent", planner, count=6))
    assert report.verdict == "re-tune"
    assert found(report, "settings").numbers["gain_pct"] < -0.5
    assert drift_summary(report, None).splitlines()[0] == "Verdict: re-tune (settings)"


def test_a_deployed_bundle_carries_what_a_check_needs(study_template, tmp_path):
    report = check(deploy(study_template.folder / "study", tmp_path / "bundle"), study_template.steps)
    shifts = [one for one in report.findings if "distance_pct" in one.numbers]
    assert len(shifts) == 4
    assert not any(shift.beyond for shift in shifts)  # the very batches of the study
    assert not any("no statistics" in note for note in report.notes)


def test_a_bundle_without_statistics_says_so(job, planner):
    old = write_bundle(job.folder / "old", planner, {"default_params": asdict(planner.params)})
    report = check(old, job.steps)
    assert (report.verdict, report.findings) == ("fits", ())
    assert any("no statistics" in note for note in report.notes)
    assert any("no measured step times" in note for note in report.notes)


def test_refit_recovers_planted_factors_in_a_new_bundle(job, planner, bundle):
    mixed = [replace(WORKLOAD, median_tokens=m, sigma=s) for m, s in ((15, 0.3), (60, 0.6), (200, 0.1), (100, 0.5))]
    for i, workload in enumerate(mixed):
        write_steps(job.folder / "recent", planner, workload, first=10 * (i + 1), count=5)
    steps = job.folder / "recent"
    times = write_times(job.folder / "times.csv", planner, steps, np.array([0.9, 1.3, 1.3, 1.0]), noise=0.003)
    before = {path.name: path.read_bytes() for path in bundle.iterdir()}
    report = check(bundle, steps, times, refit=job.folder / "refit")
    assert report.refit_refused == ""
    assert report.refit.factors["attention"] == pytest.approx(0.9, abs=0.05)
    assert report.refit.factors["experts"] == pytest.approx(1.3, abs=0.08)
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before
    new = load_planner(job.folder / "refit")
    assert new.provenance["refit"]["factors"] == report.refit.factors
    assert new.provenance["refit"]["parent"]["tables_hash"] == planner.tables.tables_hash
    assert "times corrected" in new.tables.notes[-1]
    assert any("held-out error" in line for line in drift_summary(report, None).splitlines())
    assert abs(found(check(job.folder / "refit", steps, times), "step time").numbers["median_pct"]) < 3


def test_refused_refit_writes_nothing(job, planner, bundle):
    steps = write_steps(job.folder / "recent", planner, count=6)
    times = write_times(job.folder / "times.csv", planner, steps, np.ones(4))
    report = check(bundle, steps, times, refit=job.folder / "refit")
    assert "too few" in report.refit_refused
    assert report.refit is None
    assert not (job.folder / "refit").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step,step_time\nstep00,1\n", "Did you mean step_time_s"),
        ("step,step_time_s\nstep00,nan\n", "no number of seconds"),
        ("step,step_time_s\nstep00,0\n", "not above 0"),
        ("step,step_time_s\nstep00,1\nstep00,2\n", "occurs twice"),
        ("step,step_time_s\nelsewhere,1\n", "name no given step batch"),
        ("step,step_time_s,experts_s\nstep00,1,2\n", "add up to more"),
        ("step,step_time_s,rest_s\nstep00,1,inf\n", "row 1.*no number of seconds.*'inf'"),
        ("step,step_time_s\n,1\n", "names no step"),
        ("step,step_time_s\nstep00,1,2\n", "are optional, got step"),
        ("step,step_time_s\n", "hold no step"),
        ("step,step_time_s,plan\nstep00,1,gone.json\n", "Plan of step 'step00'"),
    ],
)
def test_bad_step_times_give_one_line(job, bundle, text, message):
    times = job.folder / "times.csv"
    times.write_text(text)
    with pytest.raises(RoutePackError, match=message) as caught:
        check(bundle, job.steps, times, refit=job.folder / "refit", out=job.folder / "report.json")
    assert "\n" not in str(caught.value)
    assert not (job.folder / "refit").exists()
    assert not (job.folder / "report.json").exists()


def test_json_times_and_a_plan_of_another_step(job, planner, bundle):
    planner.plan(job.steps / "step01.npz").save(job.folder / "plan.json")
    times = job.folder / "times.json"
    times.write_text(json.dumps([{"step": "step01", "step_time_s": 1.0, "plan": "plan.json"}]))
    assert found(check(bundle, job.steps, times), "step time").numbers["steps"] == 1
    times.write_text(json.dumps([{"step": "step02", "step_time_s": 1.0, "plan": "plan.json"}]))
    with pytest.raises(RoutePackError, match="other samples"):
        check(bundle, job.steps, times)
    for text in ('[{"step": "step01", "step_time_s": 1}, 5]', '{"step": ["step01"], "step_time_s": [1]}'):
        times.write_text(text)
        with pytest.raises(RoutePackError, match="expected a list of objects"):
            check(bundle, job.steps, times)


def test_a_plan_that_ran_must_keep_the_cap_as_the_bundle_pads(job, planner):
    padding = replace(planner, params=replace(planner.params, sequence_alignment=planner.max_tokens))
    bundle = write_bundle(job.folder / "padding", padding, {"default_params": asdict(padding.params)})
    planner.plan(job.steps / "step01.npz").save(job.folder / "plan.json")
    times = job.folder / "times.json"
    times.write_text(json.dumps([{"step": "step01", "step_time_s": 1.0, "plan": "plan.json"}]))
    with pytest.raises(RoutePackError, match=r"plan\.json, does not fit: Cell .* tokens, cap"):
        check(bundle, job.steps, times)


def test_refit_never_in_place_nor_without_times(job, bundle):
    with pytest.raises(RoutePackError, match="needs measured step times"):
        check(bundle, job.steps, refit=job.folder / "refit")
    with pytest.raises(RoutePackError, match="never changed"):
        check(bundle, job.steps, job.folder / "times.csv", refit=bundle)


def test_intervals_of_median_and_trend():
    assert median_interval(np.arange(5.0)) == (2.0, 0.0, 4.0)
    assert median_interval(np.ones(1)) == (1.0, 1.0, 1.0)
    # Binomial(20, 1/2): P(X <= 5) = 0.0207, so the 6th and the 15th of 20 values.
    assert median_interval(np.arange(20.0)) == (9.5, 5.0, 14.0)
    assert trend_interval(np.arange(10.0) * 0.5) == (0.5, 0.5, 0.5)
    # Slopes of pairs 1, 1.5, 2, 2, 2.5, 3; Kendall's interval of 4 values holds them all.
    assert trend_interval(np.array([0.0, 1.0, 3.0, 6.0])) == (2.0, 1.0, 3.0)
    assert trend_interval(np.zeros(1)) == (0.0, 0.0, 0.0)


def test_the_verb_prints_the_verdict_and_exits_by_it(job, planner, bundle, capsys):
    steps = write_steps(job.folder / "recent", planner, count=10)
    fair = write_times(job.folder / "times.csv", planner, steps, np.ones(4))
    assert main(["check", str(bundle), str(steps), "--times", str(fair)]) == 0
    assert "fits" in capsys.readouterr().out
    slow = write_times(job.folder / "slow.csv", planner, steps, np.full(4, 1.6))
    assert main(["check", str(bundle), str(steps), "--times", str(slow), "--out", str(job.folder / "r.json")]) == 3
    assert "re-profile" in capsys.readouterr().out
    assert json.loads((job.folder / "r.json").read_text())["verdict"] == "re-profile"
    # One factor for everything corrects nothing that a plan depends on: refused in one line, nothing written.
    assert main(["check", str(bundle), str(steps), "--refit", str(job.folder / "new")]) == 1
    assert capsys.readouterr().err.startswith("Error: ")
    assert not (job.folder / "new").exists()


def test_a_search_too_short_for_a_receive_cap_does_not_end_the_check(job, planner, monkeypatch):
    # The check once failed in its first plan, one proposal long and made only to compile: it broke the cap.
    steps = write_steps(job.folder / "recent", planner, count=4)

    def hottest(path):
        batch = load_step_batch(path, planner.spec)
        problem = build_problem(batch, planner.tables, planner.spec, planner.topology, planner.max_tokens)
        plan = planner.plan(batch)
        priced = evaluate(problem, plan.row_N, plan.slot_N, plan.placement_LE, plan.num_rows)
        return int(priced.rank_rows_RBPL.max())

    cap = max(map(hottest, steps.glob("*.npz")))
    capped = replace(planner, params=replace(planner.params, max_received_rows=cap + cap // 20))
    bundle = write_bundle(job.folder / "capped", capped, {"default_params": asdict(capped.params)})
    times = write_times(job.folder / "times.csv", planner, steps, np.ones(4))
    plan = Planner.plan

    def strict(self, batch, seed=0, previous=None, stop=None, observer=None):
        if stop is not None and stop.max_iterations == 1:
            raise RoutePackError("EP rank 0 receives more rows than max_received_rows, and no plan found avoids it.")
        return plan(self, batch, seed, previous, stop, observer)

    monkeypatch.setattr(Planner, "plan", strict)
    assert found(check(bundle, steps, times), "step time") is not None


def test_untuned_settings_that_break_a_limit_leave_their_batches_without_a_comparison(job, planner, monkeypatch):
    # The check once ended with the error of the untuned settings, though the bundle's own keep the receive cap.
    steps = write_steps(job.folder / "recent", planner, count=4)
    tuned = replace(planner, params=replace(planner.params, max_iterations=3000))
    bundle = write_bundle(job.folder / "tuned", tuned, {"default_params": asdict(planner.params)})
    plan, kept = Planner.plan, load_step_batch(steps / "recent10.npz", planner.spec).data_hash

    def strict(self, batch, *arguments, **options):
        if self.params == planner.params and batch.data_hash != kept:
            raise RoutePackError("EP rank 0 receives more rows than max_received_rows.")
        return plan(self, batch, *arguments, **options)

    monkeypatch.setattr(Planner, "plan", strict)
    report = check(bundle, steps)
    assert found(report, "settings").numbers["batches"] == 1
    assert any("3 batches have no comparison" in note and "max_received_rows" in note for note in report.notes)
