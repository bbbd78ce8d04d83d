"""The command line: its surface is frozen, and every bad input ends with one line and nothing written."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pytest
from patience import PATIENCE_S
from typer.main import get_command

from costmodels.tables import npz_bytes
from profiler.files import write_bytes
from routepack_tune import plan
from routepack_tune.bundle import untuned_planner
from routepack_tune.cli import app, main
from routepack_tune.steps import traces

SURFACE = {
    "profile": {"--config", "--out", "--published", "--device", "--prior", "--steps", "--target-error", "--max-minutes",
                "--report", "--tables"},
    "fit": {"measurements", "--config", "--out", "--prior"},
    "tune": {"steps", "--costmodel", "--config", "--out", "--trials", "--workers", "--storage", "--ray", "--new-study",
             "--warm-start"},
    "rollback": {"name", "--tracking-uri"},
    "check": {"bundle", "steps", "--times", "--refit", "--out"},
    "deploy": {"study", "--out", "--register"},
    "plan": {"step", "--out", "--bundle", "--costmodel", "--config", "--previous", "--max-runtime", "--max-iterations",
             "--seed", "--allow-mismatch"},
    "quickstart": {"--out"},
}  # fmt: skip


def test_verbs_and_flags_are_frozen():
    commands = get_command(app).commands
    found = {
        verb: {p.opts[0] if p.param_type_name == "option" else p.name for p in command.params} - {"--help"}
        for verb, command in commands.items()
    }
    assert found == {verb: {*names, "--json"} for verb, names in SURFACE.items()}


def test_help_lists_the_verbs_in_the_order_of_work_and_cuts_no_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    verbs = re.findall(r"^  (\w+)  ", said.split("Commands:")[1], re.MULTILINE)
    assert verbs == ["profile", "fit", "tune", "deploy", "plan", "check", "rollback", "quickstart"]
    assert "..." not in said.split("Commands:")[1]
    assert "docs/" in said
    assert "--install-completion" in said


@pytest.mark.parametrize(("verb", "words"), [
    ("profile", ["profile.target_error of routepack.yaml, else 5.", "profile.max_minutes of routepack.yaml, else 10."]),
    ("tune", ["[default: 20; x>=1]", "default: a file."]),
    ("plan", ["default: as tuned.", "[default: 0; x>=0]"]),
    ("rollback", ["default: MLFLOW_TRACKING_URI"]),
    ("quickstart", ["[default: routepack-"]),
])  # fmt: skip
def test_help_says_what_holds_without_an_option(capsys, verb, words):
    assert main([verb, "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for word in words:
        assert word in said


def test_completion_is_offered(capsys, monkeypatch):
    monkeypatch.setenv("_ROUTEPACK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "routepack ro")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert main([]) == 0
    assert capsys.readouterr().out.split() == ["rollback"]


def test_defaults_are_frozen():
    commands = get_command(app).commands
    defaults = {f"{verb} {p.name}": p.default for verb, command in commands.items() for p in command.params}
    assert defaults["tune trials"] == 20
    assert defaults["plan seed"] == 0


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def everything(folder):
    return sorted(str(path) for path in folder.rglob("*"))


def plan_arguments(job, step=None, config=None):
    return ("plan", step or job.step, "--costmodel", job.costmodel, "--config", config or job.config,
            "--out", job.folder / "out" / "plan.json")  # fmt: skip


def fails(capsys, job, *arguments, words=()):
    """Run a command that must fail: one ``Error:`` line with ``words``, exit 1, no file made or changed."""
    before = everything(job.folder)
    code, out, err = run(capsys, *arguments)
    assert code == 1, err
    assert out == ""
    assert sum(line.startswith("Error: ") for line in err.splitlines()) == 1
    assert "Traceback" not in err
    for word in words:
        assert str(word) in err
    assert [path for path in everything(job.folder) if path not in before] == []


def with_arrays(job, name, **arrays):
    path = job.steps / name
    write_bytes(path, npz_bytes({k: v for k, v in {**job.arrays(), **arrays}.items() if v is not None}))
    return path


def test_truncated_npz(capsys, job):
    path = job.steps / "cut.npz"
    path.write_bytes(job.step.read_bytes()[:-200])
    fails(capsys, job, *plan_arguments(job, path), words=["cut.npz", "truncated"])


def test_counts_that_do_not_add_up(capsys, job):
    counts = job.arrays()["expert_counts"].astype(np.int64)
    counts[7, 1, 3] += 1
    path = with_arrays(job, "bad.npz", expert_counts=counts)
    fails(capsys, job, *plan_arguments(job, path), words=["bad.npz", "'p1r3' MoE layer 1", "add up to", "top_k 2"])


def test_expert_id_outside_the_model(capsys, job):
    lengths = job.arrays()["lengths"]
    ids = np.tile(np.array([0, 1], np.uint8), (int(lengths.sum()), 2, 1))
    ids[5, 1, 1] = 8
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    path = with_arrays(job, "ids.npz", expert_counts=None, expert_ids=ids, offsets=offsets, known_tokens=None)
    fails(capsys, job, *plan_arguments(job, path), words=["layer 1", "token 5", "expert id 8", "0..7", "redundant"])


def test_lengths_above_the_cap(capsys, job):
    arrays = job.arrays()
    lengths, counts = arrays["lengths"].copy(), arrays["expert_counts"].astype(np.int32)
    lengths[2], counts[2] = 300, 0
    counts[2, :, :2] = 300
    path = with_arrays(job, "long.npz", lengths=lengths, expert_counts=counts, known_tokens=lengths)
    words = ["long.npz", "p0r2", "300 tokens", "256", "at least 300"]
    fails(capsys, job, *plan_arguments(job, path), words=words)
    fails(capsys, job, "tune", job.steps, "--costmodel", job.costmodel, "--config", job.config, "--out",
          job.folder / "study", words=words)  # fmt: skip


def test_empty_batch(capsys, job):
    path = with_arrays(job, "none.npz", lengths=np.zeros(0, np.int32), expert_counts=np.zeros((0, 2, 8), np.int32),
                       sample_ids=None, prompt_ids=None, known_tokens=None)  # fmt: skip
    fails(capsys, job, *plan_arguments(job, path), words=["none.npz", "empty"])


def test_fewer_samples_than_slots(capsys, job):
    arrays = {name: array[:1] for name, array in job.arrays().items()}
    path = with_arrays(job, "one.npz", **arrays)
    fails(capsys, job, *plan_arguments(job, path), words=["1 samples", "2 DP slots"])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("max_tokens_per_microbatch: 256", "", ["`max_tokens_per_microbatch` is missing"]),
        ("max_tokens_per", "max_token_per", ["did you mean `max_tokens_per_microbatch`"]),
        ("max_iterations", "max_iteration", ["did you mean `planner.max_iterations`"]),
    ],
)
def test_missing_or_misspelt_key_in_every_verb(capsys, job, old, new, words):
    job.config.write_text(job.config.read_text().replace(old, new))
    out = job.folder / "out"
    for arguments in (
        plan_arguments(job),
        ("profile", "--config", job.config, "--out", out),
        ("fit", job.folder, "--config", job.config, "--out", out),
        ("tune", job.steps, "--costmodel", job.costmodel, "--config", job.config, "--out", out),
    ):
        fails(capsys, job, *arguments, words=["routepack.yaml", *words])


def test_cost_model_for_another_cap(capsys, job):
    job.config.write_text(job.config.read_text().replace("256", "512"))
    fails(capsys, job, *plan_arguments(job), words=["fitted for", "cap 512", "routepack fit"])


def test_missing_inputs(capsys, job):
    fails(capsys, job, *plan_arguments(job, job.steps / "no.npz"), words=["no.npz", "not found"])
    fails(capsys, job, *plan_arguments(job, config=job.folder / "no.yaml"), words=["no.yaml", "not found"])
    shutil.rmtree(job.costmodel)
    fails(capsys, job, *plan_arguments(job), words=["Cost model not found", "Run `routepack fit` first"])
    fails(capsys, job, "tune", job.steps, "--costmodel", job.costmodel, "--config", job.config, "--out",
          job.folder / "s", words=["Cost model not found", "Run `routepack fit` first"])  # fmt: skip
    fails(
        capsys, job, "plan", job.step, "--bundle", job.folder / "no", "--out", job.folder / "p", words=["Bundle not fo"]
    )
    fails(capsys, job, "deploy", job.folder, "--out", job.folder / "b", words=["no study.json", "routepack tune"])
    fails(capsys, job, "fit", job.folder / "no", "--config", job.config, "--out", job.folder / "c", words=["no"])
    fails(capsys, job, "profile", "--published", job.steps, "--config", job.config, "--out", job.folder / "m")


def test_contradicting_flags(capsys, job):
    fails(capsys, job, *plan_arguments(job), "--bundle", job.folder, words=["either --bundle"])
    fails(capsys, job, "plan", job.step, "--out", job.folder / "p.json", words=["either --bundle"])
    fails(capsys, job, *plan_arguments(job), "--max-runtime", "1", "--max-iterations", "5", words=["not both"])
    for wrong in ("nan", "inf", "0"):
        fails(capsys, job, *plan_arguments(job), "--max-runtime", wrong, words=["max runtime > 0", wrong])
    fails(capsys, job, *plan_arguments(job), "--max-iterations", "0", words=["iterations >= 1"])
    fails(capsys, job, "profile", "--published", job.steps, "--device", "cpu", "--config", job.config, "--out",
          job.folder / "m", words=["--device", "one of the two"])  # fmt: skip
    fails(capsys, job, "profile", "--published", job.steps, "--max-minutes", "3", "--config", job.config, "--out",
          job.folder / "m", words=["--max-minutes", "one of the two"])  # fmt: skip
    profile = ("profile", "--config", job.config, "--out", job.folder / "m")
    fails(
        capsys,
        job,
        *profile,
        "--target-error",
        "0",
        words=["Expected target_error to be a number from 1e-06", "got 0.0"],
    )
    fails(capsys, job, *profile, "--steps", job.folder / "none", words=["Step batches not found"])
    fails(capsys, job, *profile, "--prior", job.folder / "none", words=["none", "Run `routepack fit` first"])


def test_version(capsys):
    from routepack_tune.environment import version

    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == version()


def test_bad_usage_exits_with_two(capsys):
    for arguments in (["plan"], ["nonsense"], ["tune", "x", "--trials", "0"], ["plan", "x", "--seed", "-1"]):
        assert main(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_out_that_cannot_be_written(capsys, job):
    (job.folder / "file").write_text("")
    arguments = list(plan_arguments(job))
    fails(capsys, job, *arguments[:-1], job.folder, words=["is a folder"])
    nowhere = job.folder / "file" / "plan.json"
    for place in (nowhere, job.folder / "file" / "deeper" / "plan.json"):
        fails(capsys, job, *arguments[:-1], place, words=[f"{place} cannot be written", "Not a directory"])
    # Refused before any input is read: none of these is there.
    no, nowhere = job.folder / "no", job.folder / "file" / "out"
    for verb in (
        ("profile", "--config", no), ("fit", no, "--config", no), ("deploy", no), ("check", no, no), ("quickstart",),
        ("tune", no, "--costmodel", no, "--config", no),
    ):  # fmt: skip
        fails(capsys, job, *verb, "--out", nowhere, words=[f"{nowhere} cannot be written"])
    pipe = job.folder / "pipe"
    os.mkfifo(pipe)
    fails(capsys, job, *arguments[:-1], pipe, words=["pipe is neither a file nor a folder"])
    fails(capsys, job, *arguments[:-1], job.folder / ("x" * 300), words=["File name too long"])
    fails(capsys, job, "fit", job.folder, "--config", job.config, "--out", job.steps, words=["not replaced"])
    fails(capsys, job, "tune", job.steps, "--costmodel", job.costmodel, "--config", job.config, "--out", job.steps,
          words=["not empty"])  # fmt: skip


def test_damaged_previous_plan(capsys, job):
    code, _, _ = run(capsys, *plan_arguments(job))
    assert code == 0
    made = job.folder / "out" / "plan.json"
    document = json.loads(made.read_text())
    document["num_microbatches"] += 1
    previous = job.folder / "previous.json"
    for text in ("[]", "{", json.dumps(document), json.dumps({**document, "schema_version": 9})):
        previous.write_text(text)
        fails(capsys, job, *plan_arguments(job), "--previous", previous, words=["previous.json"])


def test_batches_of_another_model_name_the_file(capsys, job):
    path = with_arrays(job, "z-other.npz", expert_counts=np.zeros((20, 5, 8), np.int32))
    fails(capsys, job, "tune", job.steps, "--costmodel", job.costmodel, "--config", job.config, "--out",
          job.folder / "study", words=[path, "5 layers", "another model", "glob"])  # fmt: skip


def test_plan_is_written_and_repeats_byte_for_byte(capsys, job):
    first = job.folder / "out" / "plan.json"
    code, out, err = run(capsys, *plan_arguments(job), "--seed", "3")
    assert (code, err) == (0, "")
    assert "predicted step" in out
    data = first.read_bytes()
    assert run(capsys, *plan_arguments(job), "--seed", "3")[0] == 0
    assert first.read_bytes() == data
    document = json.loads(data)
    assert {"schema_version", "plan_hash", "topology", "micro_batches", "num_microbatches", "logical_to_physical",
            "physical_to_logical", "denominators", "predicted", "default", "lower_bound_s", "gap",
            "counters"} <= set(document)  # fmt: skip
    samples = sorted(i for rank in document["micro_batches"] for row in rank for i in row)
    assert samples == list(range(20))
    assert list(first.parent.iterdir()) == [first]


def test_previous_plan_and_budgets(capsys, job):
    made = job.folder / "out" / "plan.json"
    assert run(capsys, *plan_arguments(job))[0] == 0
    previous = made.rename(job.folder / "previous.json")
    assert run(capsys, *plan_arguments(job, job.steps / "step02.npz"), "--previous", previous)[0] == 0
    assert run(capsys, *plan_arguments(job), "--max-runtime", "0.2")[0] == 0
    assert run(capsys, *plan_arguments(job), "--max-iterations", "50")[0] == 0


def test_warnings_are_one_line(capsys, job, monkeypatch):
    from routepack_tune import api

    def warn(*_, **__):
        warnings.warn("first\nsecond", stacklevel=2)
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "plan", warn)
    code, _, err = run(capsys, *plan_arguments(job))
    assert code == 130
    assert err.splitlines()[0] == "Warning: first second"
    assert "same command continues" in err


def test_module_runs_as_the_command(job):
    command = [sys.executable, "-m", "routepack_tune", *map(str, plan_arguments(job, job.steps / "no.npz"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("Error: Step batch not found")
    assert len(done.stderr.splitlines()) == 1


def test_a_step_is_read_once(job, monkeypatch):
    reads, read_npz = [], traces.read_npz

    def counted(path, *arguments):
        reads.append(path)
        return read_npz(path, *arguments)

    monkeypatch.setattr(traces, "read_npz", counted)
    plan(job.step, job.folder / "plan.json", untuned_planner(job.costmodel, job.settings()))
    assert reads == [job.step]
