"""The table of all methods on all regimes, and the targets with what was reached, as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from checks import DRIFT_STEPS
from figures import drift_steps
from methods import OURS
from records import CheckRecord, PlanRecord

ROUTEPACK = "RoutePack"
FIRST_FIT_LPT = "AReaL first-fit + LPT"


@dataclass(frozen=True, slots=True)
class Target:
    """Hold one number to reach."""

    what: str
    gate: float
    aim: float
    higher: bool
    got: float | None
    """None: not measured."""

    @property
    def verdict(self) -> str:
        """``aim``, ``gate``, ``missed`` or ``not measured``."""
        if self.got is None:
            return "not measured"
        sign = 1 if self.higher else -1
        reached = [name for name, level in (("aim", self.aim), ("gate", self.gate)) if sign * (self.got - level) >= 0]
        return reached[0] if reached else "missed"


class Results:
    """Look up medians over batches."""

    def __init__(self, records: Sequence[PlanRecord], checks: Sequence[CheckRecord], order: Sequence[str]) -> None:
        self.records, self.checks = records, checks
        present = {record.regime for record in records}
        self.regimes = [regime for regime in order if regime in present]

    def of(self, regime: str, method: str, budget_s: float) -> list[PlanRecord]:
        """Return the records of a method, by batch."""
        wanted = (regime, method, budget_s)
        found = [r for r in self.records if (r.regime, r.method, r.budget_s) == wanted]
        return sorted(found, key=lambda r: r.instance)

    def value(self, regime: str, budget_s: float, quantity: str = "percent", method: str = OURS) -> float | None:
        """Return the median of a quantity."""
        found = self.of(regime, method, budget_s)
        return median(getattr(r, quantity) for r in found) if found else None

    def saved_percent(self, regime: str, budget_s: float, peer_budget_s: float) -> float | None:
        """Return how much less step time ours needs than RoutePack on the same batches, percent, median."""
        peer = {r.instance: r.step_s for r in self.of(regime, ROUTEPACK, peer_budget_s)}
        saved = [100 * (1 - r.step_s / peer[r.instance]) for r in self.of(regime, OURS, budget_s) if r.instance in peer]
        return median(saved) if saved else None

    def check(self, name: str, quantity: str, variant: str = "", over: Callable[..., float] = median) -> float | None:
        """Return a quantity of a check over batches."""
        found = [
            c.value for c in self.checks if (c.check, c.quantity) == (name, quantity) and variant in ("", c.variant)
        ]
        return over(found) if found else None


def targets(results: Results) -> list[Target]:
    """Return every number that the planner has to reach."""
    percents = (
        ("gsm8k-short", 0.5, 99.7, 99.9), ("math-long", 2, 97.5, 98.3), ("math-long", 20, 98.0, 98.6),
        ("math-long-ep32", 2, 89.5, 90.5), ("agentic-long", 2, 98.7, 99.2), ("moderate-skew", 2, 96.0, 97.5),
        ("giant", 5, 64.5, 65.0), ("giant", 20, 64.9, 65.0),
    )  # fmt: skip
    found = [
        Target(f"{regime}, {budget:g} s: percent of ideal", gate, aim, True, results.value(regime, budget))
        for regime, budget, gate, aim in percents
    ]
    gaps = (("math-long-ep32", 20, 3.0, 3.0), ("real-gptoss", 2, 4.5, 3.0), ("real-v2lite", 2, 2.0, 1.0))
    for regime, budget, gate, aim in gaps:
        gap = results.value(regime, budget, "gap_percent")
        found.append(Target(f"{regime}, {budget} s: gap to the proven bound, %", gate, aim, False, gap))
    for regime, gate in (("real-gptoss", 0.7), ("real-v2lite", 1.0)):
        saved = results.saved_percent(regime, 2.0, 10.0)
        found.append(Target(f"{regime}, 2 s: less step time than RoutePack in 10 s, %", gate, 1.5, True, saved))
    return [*found, *_giant_start(results), *_check_targets(results)]


def _giant_start(results: Results) -> Iterable[Target]:
    soonest, peer = results.value("giant", 0.5), results.value("giant", 0.0, method=FIRST_FIT_LPT)
    more = None if soonest is None or peer is None else soonest - peer
    yield Target(f"giant, 0.5 s: points above {FIRST_FIT_LPT}", 0.0, 0.0, True, more)


def _check_targets(results: Results) -> Iterable[Target]:
    late = results.check("replan", "from scratch, 2 s")
    for name, label in (("from previous, moves free, 0.5 s", "moves free"), ("from previous, 0.5 s", "moves priced")):
        soon = results.check("replan", name)
        gained = None if soon is None or late is None else soon - late
        yield Target(f"math-long, replanned in 0.5 s, {label}: points above 2 s from scratch", 0.0, 0.0, True, gained)
    speed = results.check("speed", "whole schedule: priced per s")
    speed = None if speed is None else speed / 1e6
    yield Target("math-long: priced proposals per second and core, million", 1.5, 1.5, True, speed)
    moved = drift_steps(results.checks, "sticky", "moved share")
    yield Target(f"math-long, {DRIFT_STEPS} drifting steps: experts relocated per step, %", 10, 10, False,
                 100 * sum(moved) / len(moved) if moved else None)  # fmt: skip
    sticky, free = (sum(drift_steps(results.checks, name, "step s")) for name in ("sticky", "stickiness 0"))
    yield Target(
        "the same: step time above free moving, %", 0.5, 0.5, False, 100 * (sticky / free - 1) if free else None
    )
    paid = [sum(drift_steps(results.checks, name, "moving s")) for name in ("sticky", "stickiness 0")]
    yield Target("the same, with the seconds that moving takes, %", 0.5, 0.5, False,
                 100 * ((sticky + paid[0]) / (free + paid[1]) - 1) if free else None)  # fmt: skip
    yield Target("determinism: same bytes (threads, processes, hash seeds)", 1, 1, True,
                 results.check("determinism", "all the same"))  # fmt: skip
    yield Target("giant: peak memory, GiB", 4, 4, False, results.check("memory", "peak_gib", over=max))


def percent_table(results: Results) -> list[list[str]]:
    """Return the header and one row per method and budget: median percent of ideal, V where a cap is broken."""

    def cell(found: list[PlanRecord]) -> str:
        return f"{median(r.percent for r in found):.1f}{' V' if any(r.over_cap_percent > 0 for r in found) else ''}"

    limits = []
    for regime in results.regimes:
        by_instance = {r.instance: r.percent * (1 + r.gap_percent / 100) for r in results.records if r.regime == regime}
        limits.append(f"{median(by_instance.values()):.1f}")
    return [*_grid(results, cell), ["no plan can exceed (proven bound)", *limits]]


def gap_table(results: Results) -> list[list[str]]:
    """Return likewise the median gap to the proven bound, percent."""
    return _grid(results, lambda found: f"{median(r.gap_percent for r in found):.1f}")


def seconds_table(results: Results) -> list[list[str]]:
    """Return likewise the median planning time, seconds."""
    return _grid(results, lambda found: f"{median(r.plan_s for r in found):.3g}")


def _grid(results: Results, cell: Callable[[list[PlanRecord]], str]) -> list[list[str]]:
    methods = sorted({(r.method == OURS, r.budget_s > 0, r.method, r.budget_s) for r in results.records})
    rows = [["method", *results.regimes]]
    for *_, method, budget_s in methods:
        found = [results.of(regime, method, budget_s) for regime in results.regimes]
        name = f"{method}, {budget_s:g} s" if budget_s else method
        rows.append([name, *(cell(one) if one else "-" for one in found)])
    return rows


def imbalance_table(results: Results) -> list[list[str]]:
    """Return the step-level rank imbalance of every regime's batches, medians."""
    quantities = ("identity mean", "identity least", "identity most", "LPT mean", "hottest expert over mean rank")
    rows = [["regime", *quantities]]
    for regime in dict.fromkeys(c.regime for c in results.checks if c.check == "imbalance"):
        mine = [c for c in results.checks if c.check == "imbalance" and c.regime == regime]
        rows.append([regime, *(f"{median(c.value for c in mine if c.quantity == q):.2f}" for q in quantities)])
    return rows


def checks_table(results: Results) -> list[list[str]]:
    """Return every other check, medians over batches; drift is averaged over its steps."""
    values: dict[tuple[str, str, str], list[float]] = {}
    for c in results.checks:
        if c.check != "imbalance":
            values.setdefault((c.check, c.variant, c.quantity.partition(", step ")[0]), []).append(c.value)
    return [["check", "of", "quantity", "median"], *([*key, f"{median(found):.4g}"] for key, found in values.items())]


def targets_table(found: Sequence[Target]) -> list[list[str]]:
    """Return the targets with what was reached."""
    rows = [["target", "gate", "aim", "reached", "verdict"]]
    for t in found:
        rows.append([t.what, f"{t.gate:g}", f"{t.aim:g}", "-" if t.got is None else f"{t.got:.2f}", t.verdict])
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    header, *body = rows
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def report(results: Results) -> str:
    """Return the whole document."""
    counts = {regime: len({r.instance for r in results.records if r.regime == regime}) for regime in results.regimes}
    batches = ", ".join(f"{regime} {count}" for regime, count in counts.items())
    parts = [
        "# Results of 02_planner\n\nWritten by run.py. Step times are predicted from published H200 times (backward "
        "assumed); planning times are measured. Regimes are synthetic unless called real. Medians over batches "
        f"({batches}). V: a microbatch exceeds the token cap, so the plan could not be run.",
        "## Percent of the forced-balanced ideal\n\n" + markdown(percent_table(results)),
        "## Targets\n\n" + markdown(targets_table(targets(results))),
        "## Gap to the proven lower bound, percent\n\n" + markdown(gap_table(results)),
        "## Planning time, seconds (measured)\n\n" + markdown(seconds_table(results)),
        "## Rank imbalance of the batches (most loaded rank over the mean, step totals)\n\n"
        + markdown(imbalance_table(results)),
        "## Other checks\n\n" + markdown(checks_table(results)),
    ]
    return "\n\n".join(parts) + "\n"
