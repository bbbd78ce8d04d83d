"""The doors of what a person writes: ``routepack.yaml``, a model's ``config.json``, the command line over all doors."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import doors
import fit_doors
import judge
import operators as op
from hashes import rehash_bundle, rehash_study
from values import YAML_TEXTS, YAML_VALUES


def mutate_yaml(rng: op.Rng, case: Path) -> str:
    """Change values (all that may be given), YAML's own spellings, text or bytes."""
    import yaml

    path, kind = case / "routepack.yaml", rng.random()
    text = path.read_text()
    if kind < 0.4:
        tree = yaml.safe_load(text)
        for name in ("planner", "profile", "fit", "tune"):  # all that may be given, so that all of it is changed
            if rng.random() < 0.4:
                tree[name] = {**asdict(getattr(doors.config(), name)), **tree.get(name, {})}
        said = op.change_tree(rng, tree)
        text = op.dumps_root(tree)
    elif kind < 0.65:
        lines = text.splitlines()
        at = int(rng.integers(len(lines)))
        new = op.one_of(rng, YAML_VALUES)
        lines[at], said = re.sub(r": *[^:{]*$", lambda _: f": {new}", lines[at]), f"line {at + 1}: {new[:40]}"
        text = "\n".join(lines) + "\n"
    elif kind < 0.8:
        new = op.one_of(rng, YAML_TEXTS)
        text, said = (
            op.one_of(rng, (new, new + text, text + new, text + "extra: \n  " + new.replace("\n", "\n  "))),
            new[:40],
        )
    elif kind < 0.9:
        text, said = op.change_text(rng, text)
    else:
        data, said = op.change_bytes(rng, text.encode())
        path.write_bytes(data)
        return f"routepack.yaml: {said}"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return f"routepack.yaml: {said!r}"


def walk_yaml(case: Path) -> None:
    """Read the configuration, judge all of it, and plan with it."""
    from routepack_tune.bundle import untuned_planner
    from routepack_tune.config import load_config

    found = load_config(case / "routepack.yaml")
    judge.check_spec(found.model)
    judge.check_topology(found.topology)
    judge.holds(judge.whole(found.max_tokens_per_microbatch, 1, 2**40), f"cap {found.max_tokens_per_microbatch!r:.40}")
    for part in (found.planner, found.profile, found.fit, found.tune):
        judge.check_params(part)
    json.dumps(found.effective, allow_nan=False)
    doors.judge_planner(untuned_planner(case / "costmodel", found))


# --- a model's configuration ---


def mutate_model(rng: op.Rng, case: Path) -> str:
    """Change the job's ``config.json`` or that of a shipped model."""
    from profiler.model_spec import MODELS

    path = case / "model" / "config.json"
    if rng.random() < 0.6:
        path.write_text(op.one_of(rng, sorted(MODELS.glob("*.json"))).read_text())
    return doors.change_json(rng, path)


PLAIN = {
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "num_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "moe_intermediate_size",
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "num_hidden_layers": "num_layers",
    "v_head_dim": "v_head_dim",
}
"""Keys of configurations that a spec holds as they are, where a file states them."""


def walk_model(case: Path) -> None:
    """Read the model, compare it with what is stated, and freeze tables where its kinds of layers are priced."""
    from costmodels import freeze_tables
    from profiler import Topology, load_model

    path = case / "model" / "config.json"
    spec = load_model(str(path))
    judge.check_spec(spec)
    stated = json.loads(path.read_text(encoding="utf-8-sig"))
    mla = stated.get("kv_lora_rank") is not None
    for key, name in PLAIN.items():
        if stated.get(key) is not None and not (mla and key == "num_key_value_heads"):
            judge.holds(
                getattr(spec, name) == stated[key], f"{name} = {getattr(spec, name)!r:.40}, {key} {stated[key]!r:.40}"
            )
    for key, value in stated.items():  # every size that is stated is a size
        if key in PLAIN or key in ("head_dim", "intermediate_size", "sliding_window", "n_shared_experts"):
            judge.holds(value is None or judge.whole(value, 0, 2**40), f"{key} = {value!r:.40}")
    if spec.attention == "gqa" and not spec.linear_layers:  # what the unchanged cost model can price
        judge.check_tables(freeze_tables(doors.cost_model(), spec, Topology(), 64), spec, Topology(), 64)


# --- a running job, and settings of another study ---


def stated_job() -> dict[str, Any]:
    """Return what the unchanged job states."""
    settings = doors.config()
    return {
        "model": json.loads((doors.PRISTINE / "model" / "config.json").read_text()),
        "topology": asdict(settings.topology),
        "max_tokens_per_microbatch": settings.max_tokens_per_microbatch,
        "dtype": "float32",
    }


def mutate_job(rng: op.Rng, case: Path) -> str:
    """Change what a training job states of itself when it loads a bundle."""
    stated = stated_job()
    said = op.change_tree(rng, stated)
    (case / "job.json").write_text(op.dumps_root(stated), errors="surrogatepass")
    return f"job: {said}"


def walk_job(case: Path) -> None:
    """Load the bundle for the job that is stated, as far as Python's own parser makes values of it."""
    from profiler.errors import RoutePackError
    from routepack_tune import load_planner

    try:
        stated = json.loads((case / "job.json").read_text())
    except (ValueError, RecursionError):
        raise RoutePackError("What is stated is no mapping that Python can hold.") from None
    found = load_planner(case / "bundle", True, False, stated)
    sizes = stated.get("topology") or {}
    for name, value in asdict(found.topology).items():
        judge.holds(sizes.get(name) in (None, value), f"{name} is {value}, the job states {sizes.get(name)!r:.40}")
    cap = stated.get("max_tokens_per_microbatch")
    judge.holds(cap in (None, found.max_tokens), f"cap {found.max_tokens}, the job states {cap!r:.40}")


def mutate_warm(rng: op.Rng, case: Path) -> str:
    """Change a study or a bundle whose best settings another study begins with."""
    if rng.random() < 0.5:
        shutil.move(case / "bundle", case / "start")
        return doors.change_json(rng, case / "start" / "planner.yaml", rehash_bundle)
    shutil.move(case / "study", case / "start")
    return doors.change_json(rng, case / "start" / "study.json", rehash_study)


def walk_warm(case: Path) -> None:
    """Take the settings, and judge that they lie inside what the study may choose."""
    from routepack_tune.study.verbs import best_setting

    task = doors.task()
    for name, value in best_setting(case / "start", task).items():
        knob = task.space[name]
        whole = not knob.integer or judge.whole(value)
        judge.holds(whole and judge.number(value) and knob.low <= value <= knob.high, f"{name} = {value!r:.40}")


# --- the command line ---

Verb = tuple[Callable[[op.Rng, Path], str], Callable[[Path], list[str]]]
VERBS: dict[str, Verb] = {
    "plan step": (
        doors.mutate_step,
        lambda c: ["plan", f"{c}/step.npz", "--bundle", f"{c}/bundle", "--out", f"{c}/o.json"],
    ),
    "plan bundle": (
        doors.mutate_bundle,
        lambda c: [
            "plan",
            f"{c}/steps/step1.npz",
            "--bundle",
            f"{c}/bundle",
            "--out",
            f"{c}/o.json",
            "--allow-mismatch",
        ],
    ),
    "plan previous": (
        doors.mutate_plan,
        lambda c: [
            "plan",
            f"{c}/steps/step1.npz",
            "--bundle",
            f"{c}/bundle",
            "--previous",
            f"{c}/plan.json",
            "--out",
            f"{c}/o.json",
        ],
    ),
    "plan config": (
        mutate_yaml,
        lambda c: [
            "plan",
            f"{c}/steps/step1.npz",
            "--costmodel",
            f"{c}/costmodel",
            "--config",
            f"{c}/routepack.yaml",
            "--out",
            f"{c}/o.json",
        ],
    ),
    "plan tables": (
        doors.mutate_tables,
        lambda c: [
            "plan",
            f"{c}/steps/step1.npz",
            "--costmodel",
            f"{c}/costmodel",
            "--config",
            f"{c}/routepack.yaml",
            "--out",
            f"{c}/o.json",
        ],
    ),
    "deploy": (doors.mutate_study, lambda c: ["deploy", f"{c}/study", "--out", f"{c}/o"]),
    "check": (
        doors.mutate_recheck,
        lambda c: [
            "check",
            f"{c}/bundle",
            f"{c}/steps",
            "--times",
            str(next(Path(c).glob("times.*"))),
            "--out",
            f"{c}/o.json",
        ],
    ),
    "profile": (
        fit_doors.mutate_published,
        lambda c: ["profile", "--config", f"{c}/routepack.yaml", "--published", f"{c}/published", "--out", f"{c}/o"],
    ),
}
"""By name: how an input is changed, and the arguments. What writes to MLflow takes seconds and is left out."""
ARGUMENTS = {
    "--seed": ("-1", "1e3", "x", "", str(2**63), str(2**64), "9" * 5000, "0.5", "nan"),
    "--max-runtime": ("-1", "0", "nan", "inf", "-inf", "x", "", "1e-320", "1e400", "9" * 5000),
    "--max-iterations": ("-1", "0", "x", "1.5", "nan", ""),
    "--previous": (
        "",
        ".",
        "/",
        "/dev/null",
        "no\x1b[31msuch",
        "a\nb",
        "x" * 300,
        "x" * 5000,
        "{}",
        "~",
        "$HOME",
        "é\udcff",
    ),
    "--bundle": ("", ".", "/", "/dev/null", "a\nb", "models:/", "models:/x", "x" * 5000, "é\udcff"),
    "--out": ("", ".", "/", "/dev/null", "/proc/x", "x" * 300, "no\x1b[31msuch/a/b", "/dev/full", "é\udcff/x"),
}


def mutate_command(rng: op.Rng, case: Path) -> str:
    """Change an argument, or an input of one of the verbs."""
    if rng.random() < 0.3:
        flag = op.one_of(rng, sorted(ARGUMENTS))
        value = op.one_of(rng, ARGUMENTS[flag])
        said = ["plan", f"{case}/steps/step1.npz", "--bundle", f"{case}/bundle", "--out", f"{case}/o.json", flag, value]
    else:
        name = op.one_of(rng, sorted(VERBS))
        mutate, arguments = VERBS[name]
        changed, said = mutate(rng, case), arguments(case)
        (case / "what").write_text(f"{name}: {changed}", errors="surrogateescape")
    if rng.random() < 0.3:
        said.append("--json")
    (case / "arguments").write_text(json.dumps(said))
    return (case / "what").read_text() if (case / "what").exists() else f"{said[-2]} {said[-1]!r:.40}"


def walk_command(case: Path) -> None:
    """Run the verb; a refusal is one line on stderr, exit 1 or 2, nothing written and nothing left behind."""
    from profiler.errors import RoutePackError
    from routepack_tune.cli import main

    arguments = json.loads((case / "arguments").read_text())
    before, out, err = left(case), io.StringIO(), io.StringIO()
    os.chdir(case)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    errors = [line for line in err.getvalue().splitlines() if line.startswith("Error")]
    if code in (0, 3):
        if "--json" in arguments:
            json.loads(out.getvalue(), parse_constant=_no_constant)
        if (case / "o.json").exists() and arguments[0] == "plan":
            judge.check_plan_file(case / "o.json")
        return
    judge.holds(left(case) == before, f"exit {code}, but left {sorted(left(case) - before)[:3]}")
    if code == 2:  # usage: Typer's own words
        raise RoutePackError("arguments: " + " ".join(err.getvalue().split())[-120:])
    judge.holds(
        code == 1 and len(errors) == 1, f"exit {code} with {len(errors)} lines of error: {err.getvalue()[-120:]!r}"
    )
    raise RoutePackError(errors[0].removeprefix("Error: "))


def left(case: Path) -> set[str]:
    """Return the files of a case, without numba's and locks."""
    return {str(path.relative_to(case)) for path in case.rglob("*") if not path.name.endswith(".lock")}


def _no_constant(name: str) -> None:
    raise judge.Wrong(f"{name} in the JSON that was printed")


def prepare(door: str, number: int, case: Path) -> None:
    """Complete a copy of the unchanged job by what a door's mutation otherwise makes."""
    if door == "step":
        shutil.copy(doors.PRISTINE / ("routes.npz" if number else "steps/step0.npz"), case / "step.npz")
    elif door == "command":
        (case / "arguments").write_text(json.dumps(VERBS["plan bundle"][1](case)))
    elif door == "job":
        (case / "job.json").write_text(json.dumps(stated_job()))
    elif door == "warm start":
        shutil.move(case / ("bundle" if number else "study"), case / "start")


D = doors.Door
DOORS: dict[str, doors.Door] = {
    "step": D(0.21, (), doors.mutate_step, doors.walk_step),
    "bundle": D(0.16, ("bundle",), doors.mutate_bundle, doors.walk_bundle),
    "plan": D(0.13, ("plan.json",), doors.mutate_plan, doors.walk_plan),
    "yaml": D(0.09, ("routepack.yaml", "model", "costmodel"), mutate_yaml, walk_yaml),
    "model": D(0.09, ("model",), mutate_model, walk_model),
    "tables": D(0.06, ("costmodel",), doors.mutate_tables, doors.walk_tables),
    "costmodel": D(0.03, ("costmodel",), fit_doors.mutate_costmodel, fit_doors.walk_costmodel),
    "measurements": D(0.03, ("measurements", "profile"), fit_doors.mutate_measurements, fit_doors.walk_measurements),
    "published": D(0.03, ("published",), fit_doors.mutate_published, fit_doors.walk_published),
    "study": D(0.04, ("study",), doors.mutate_study, doors.walk_study),
    "journal": D(0.03, ("study",), doors.mutate_journal, doors.walk_journal),
    "job": D(0.02, ("bundle",), mutate_job, walk_job),
    "warm start": D(0.02, ("bundle", "study"), mutate_warm, walk_warm),
    "recheck": D(0.02, ("bundle", "steps", "times.csv"), doors.mutate_recheck, doors.walk_recheck),
    "command": D(
        0.04,
        ("bundle", "steps", "times.csv", "study", "published", "costmodel", "plan.json", "model", "routepack.yaml"),
        mutate_command,
        walk_command,
    ),
}
