"""What MLflow's pages say of a study and of a registered planner: numbers, tags, and text in Markdown.

Every number is of the held-out batches, mean over batches and seeds: step times and moves of experts predicted by the
cost model, planning time measured on the tuning host. *Before* are the planner's default settings, *after* is what is
exported.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from profiler.files import content_hash
from routepack_tune.reports.page import in_words

NUMBERS = {
    "step_time_s": "step time, s (predicted)",
    "plan_s": "planning, s (measured)",
    "move_s": "moves of experts, s (predicted)",
    "gap_to_bound": "gap to the proven bound",
}
WHEN = ("before", "after")
PLANNER_TAG = "routepack.planner"
"""Tag of a model version: the hash of all that its plans depend on."""
PLANNED_WITH = ("model", "topology", "max_tokens_per_microbatch", "params", "files")
"""What of a bundle's file decides its plans; ``files`` holds the hash of the frozen times."""
ABOUT_PLANNERS = (
    "Planners of RoutePack-Tune: each version is a bundle, the settings and frozen times with which a training job "
    "plans its steps. `@champion` is the one to train with, `@previous` the one to go back to (`routepack rollback`)."
)
ABOUT_COST_MODELS = (
    "Cost models of RoutePack-Tune: the times of a model's operations on a device, learned from timings. `@champion` "
    "is the latest, `@previous` the one before."
)
ABOUT_EXPERIMENT = (
    "Studies of RoutePack-Tune: one run a study, with a nested run for every trial; fits of cost models are runs of "
    "their own. Metrics that end in `_before` are of the planner's default settings, in `_after` of what is exported, "
    "both on held-out step batches. Step times are predicted, planning times measured."
)


def before_and_after(summary: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return each of ``NUMBERS`` with default settings and as exported; nothing where no batch was held out."""
    before = summary["holdout"]["default_settings"]
    after = summary["holdout"]["best"] if summary["export"] == "best" else before
    return {name: (_mean(before, name), _mean(after, name)) for name in NUMBERS} if before else {}


def _mean(scores: list[Mapping[str, Any]], name: str) -> float:
    if name == "gap_to_bound":
        return statistics.fmean(score["step_time_s"] / score["lower_bound_s"] - 1 for score in scores)
    return statistics.fmean(score[name] for score in scores)


def gain_pct(numbers: Mapping[str, tuple[float, float]]) -> float:
    """Return the share of step time and moves that is gained, percent; planning is told apart."""
    before_s, after_s = (numbers["step_time_s"][k] + numbers["move_s"][k] for k in (0, 1))
    return 100 * (1 - after_s / before_s)


def number_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return ``before_and_after`` as metrics of a run, and the gain in step time and moves."""
    numbers = before_and_after(summary)
    gain = {"step_and_moves_gain_pct": gain_pct(numbers)} if numbers else {}
    before, after = ({f"{name}_{when}": pair[k] for name, pair in numbers.items()} for k, when in enumerate(WHEN))
    return before | after | gain


def study_note(document: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Return what a study's run says of itself."""
    what = "The default settings are" if summary["export"] == "defaults" else f"Trial {summary['best']['number']} is"
    lines = [
        f"**{what} exported.** {summary['export_reason']}",
        f"{_job(document['config'])} {_device(document['fingerprint'])}",
    ]
    if numbers := before_and_after(summary):
        rows = [f"| {NUMBERS[name]} | {before:.4g} | {after:.4g} |" for name, (before, after) in numbers.items()]
        lines.append("\n".join(["| held-out batches, mean | default settings | exported |", "|---|---|---|", *rows]))
    lines.append("The artifact `tuning-report.html` shows the whole study; `routepack deploy` makes a bundle of it.")
    return "\n\n".join(lines)


def planner_hash(bundle: Mapping[str, Any]) -> str:
    """Return the hash of all that the plans of a bundle depend on; ``bundle`` is what its ``planner.yaml`` holds."""
    return content_hash({name: bundle[name] for name in PLANNED_WITH})


def version_note(bundle: Mapping[str, Any], summary: Mapping[str, Any], name: str) -> str:
    """Return what a registered version says of itself, in one paragraph."""
    told = [_job(bundle), _device(bundle["fingerprint"])]
    provenance = bundle["provenance"]
    told.append(f"It holds {_exported(provenance)} of study {provenance['study']}. {provenance['export_reason']}")
    if numbers := before_and_after(summary):
        pairs = [f"{NUMBERS[name]} {before:.4g} -> {after:.4g}" for name, (before, after) in numbers.items()]
        told.append(f"Held-out batches, default settings -> exported: {'; '.join(pairs)}.")
    told.append(f'Load it with `routepack_tune.load_planner("models:/{name}@champion")`, which needs numpy and numba.')
    return " ".join(told)


def version_tags(bundle: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags by which versions are told apart in the registry's table."""
    numbers = before_and_after(summary)
    gain = {"step and moves gain": f"{gain_pct(numbers):+.2f}%"} if numbers else {}
    device, provenance = bundle["fingerprint"], bundle["provenance"]
    return {
        PLANNER_TAG: planner_hash(bundle),
        "model": bundle["model"]["name"],
        "topology": in_words(bundle["topology"]),
        "device": f"{device['name']} ({device['origin']})",
        "export": _exported(provenance),
        "study": provenance["study"],
        **gain,
        **{name: f"{before:.4g} -> {after:.4g}" for name, (before, after) in numbers.items()},
    }


def _exported(provenance: Mapping[str, Any]) -> str:
    return "the default settings" if provenance["export"] == "defaults" else f"trial {provenance['trial']}"


def _job(config: Mapping[str, Any]) -> str:
    cap = config["max_tokens_per_microbatch"]
    return f"{config['model']['name']}, {in_words(config['topology'])}, microbatches of at most {cap} tokens."


def _device(fingerprint: Mapping[str, Any]) -> str:
    return f"Times were {fingerprint['origin']} on {fingerprint['name']}."
