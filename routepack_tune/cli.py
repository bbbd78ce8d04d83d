"""The command ``routepack``: eight verbs, few flags; everything else is in ``routepack.yaml``.

Stdout holds a verb's result, as text or, with ``--json``, as one JSON document; all else goes to stderr.
Expected failures print one line ``Error: ...`` on stderr and exit with 1, bad usage exits with 2; bugs keep their
traceback.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option, Typer

from profiler.errors import RoutePackError, explained
from profiler.params import ProfileParams
from profiler.places import NO_ROOM
from routepack_tune import api, facts, summaries
from routepack_tune.bundle import load_planner, untuned_planner
from routepack_tune.config import load_config
from routepack_tune.environment import version as installed_version
from routepack_tune.planner import Planner
from routepack_tune.progress import ProgressBars, is_first_rank

app = Typer(
    name="routepack",
    help="Plan MoE reinforcement-learning steps: balance attention and experts together, from learned times.",
    epilog="Documentation: README.md and docs/ of the repository. Every verb has --help.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Config = Annotated[Path, Option("--config", help="routepack.yaml: model, topology, token cap, sections.")]
Json = Annotated[bool, Option("--json", help="Print one JSON document instead of text.")]
Folders = list[Path] | None
OWN = {
    name: f"Default: profile.{name} of routepack.yaml, else {getattr(ProfileParams(), name):g}."
    for name in ("target_error", "max_minutes")
}


def _print(as_json: bool, found: Mapping[str, Any], text: str) -> None:
    """Print what a verb found, for programs or for people."""
    print(json.dumps(facts.finite(found), default=str) if as_json else text)


@app.command()
def profile(
    config: Config,
    out: Annotated[Path, Option(help="Folder of the measurements; an interrupted one is continued.")],
    published: Annotated[Path | None, Option(help="Import public timing tables from here instead.")] = None,
    device: Annotated[str | None, Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    prior: Annotated[Folders, Option(metavar="DIR", help="Cost model of a sibling device: fewer cases do.")] = None,
    steps: Annotated[
        list[str] | None, Option(metavar="STEPS", help="Your step batches (folder, file or glob): what is timed first.")
    ] = None,
    target_error: Annotated[
        float | None, Option(metavar="PCT", help=f"Stop when held-out median errors are below. {OWN['target_error']}")
    ] = None,
    max_minutes: Annotated[
        float | None, Option(metavar="MIN", help=f"Stop after so many minutes; 0: no limit. {OWN['max_minutes']}")
    ] = None,
    report: Annotated[bool, Option("--report", help="Draw the profile into the folder.")] = False,
    tables: Annotated[str | None, Option(metavar="NAME", help="Software whose tables --published takes.")] = None,
    as_json: Json = False,
) -> None:
    """Time a training step's operations, or import published times."""
    with ProgressBars() as bars:
        found = api.profile(
            config, out, published, device, bars, prior or (), steps or (), target_error, max_minutes, report, tables
        )
    if is_first_rank():
        _print(as_json, facts.measurements_facts(found, out, report), summaries.measurements_summary(found, out))


@app.command()
def fit(
    measurements: Annotated[list[Path], Argument(help="Folder(s) that `routepack profile` wrote.")],
    config: Config,
    out: Annotated[Path, Option(help="Folder of the cost model.")],
    prior: Annotated[Folders, Option(metavar="DIR", help="Cost model of a sibling GPU; may be repeated.")] = None,
    as_json: Json = False,
) -> None:
    """Learn times of any size and freeze them into tables."""
    with ProgressBars() as bars:
        model = api.fit(measurements, config, out, observer=bars, priors=prior or ())
    _print(as_json, facts.cost_model_facts(model, out), summaries.cost_model_summary(model, out))


@app.command()
def tune(
    steps: Annotated[list[str], Argument(metavar="STEPS_DIR", help="Step batches: a folder, files or a glob.")],
    costmodel: Annotated[Path, Option(help="Folder that `routepack fit` wrote.")],
    config: Config,
    out: Annotated[Path, Option(help="Folder of the study; an interrupted one is continued.")],
    trials: Annotated[int, Option(min=1, help="Total number of trials, finished ones included.")] = 20,
    workers: Annotated[int, Option(min=1, metavar="N", help="Processes of this machine.")] = 1,
    storage: Annotated[
        str | None, Option(help="Optuna URL of a server, for several machines; default: a file.")
    ] = None,
    ray: Annotated[bool, Option("--ray", help="Run the workers as tasks of a Ray cluster.")] = False,
    new_study: Annotated[bool, Option("--new-study", help="Begin afresh; the earlier study is kept.")] = False,
    warm_start: Annotated[Folders, Option(metavar="DIR", help="Study or bundle whose best is tried first.")] = None,
    as_json: Json = False,
) -> None:
    """Tune the planner's settings on step batches, some held out."""
    how: dict[str, Any] = {"workers": workers, "ray": ray, "new_study": new_study, "warm_start": warm_start or ()}
    with ProgressBars() as bars:
        done = api.tune(steps, costmodel, config, out, trials, storage, observer=bars, **how)
    _print(as_json, facts.study_facts(done, out), summaries.study_summary(done, out))


@app.command()
def deploy(
    study: Annotated[Path, Argument(help="Folder that `routepack tune` wrote.")],
    out: Annotated[Path, Option(help="Folder of the bundle.")],
    register: Annotated[str | None, Option(metavar="NAME", help="Also register it in MLflow.")] = None,
    as_json: Json = False,
) -> None:
    """Turn a study's best trial into the bundle that training loads."""
    made = api.deploy(study, out, register=register)
    _print(as_json, facts.bundle_facts(made, register), summaries.bundle_summary(made, register))


@app.command()
def plan(
    step: Annotated[Path, Argument(metavar="STEP.npz", help="The step batch.")],
    out: Annotated[Path, Option(help="The plan to write, JSON.")],
    bundle: Annotated[Path | None, Option(help="Folder that `routepack deploy` wrote.")] = None,
    costmodel: Annotated[Path | None, Option(help="Instead of a bundle, with --config.")] = None,
    config: Annotated[Path | None, Option(help="Instead of a bundle, with --costmodel.")] = None,
    previous: Annotated[Path | None, Option(help="Last step's plan: experts move only where it pays.")] = None,
    max_runtime: Annotated[
        float | None, Option(metavar="S", help="Stop after so many seconds; default: no such limit.")
    ] = None,
    max_iterations: Annotated[
        int | None, Option(metavar="N", help="Stop after so many proposals; default: as tuned.")
    ] = None,
    seed: Annotated[int, Option(min=0, help="Equal input, settings and seed give an equal plan.")] = 0,
    allow_mismatch: Annotated[bool, Option("--allow-mismatch", help="Use a bundle of another device.")] = False,
    as_json: Json = False,
) -> None:
    """Plan one step batch."""
    from search import StopCriterion

    if max_runtime is not None and max_iterations is not None:
        raise RoutePackError("Give --max-runtime or --max-iterations, not both.")
    with explained(of=ValueError):
        stop = StopCriterion(max_iterations=max_iterations, max_runtime=max_runtime)
    planner = _planner(bundle, costmodel, config, allow_mismatch)
    with ProgressBars() as bars:
        made = api.plan(step, out, planner, previous, seed=seed, stop=stop, observer=bars)
    _print(as_json, facts.plan_facts(made, out), summaries.plan_summary(made, out))


def _planner(bundle: Path | None, costmodel: Path | None, config: Path | None, allow_mismatch: bool) -> Planner:
    if bundle is not None and costmodel is None and config is None:
        return load_planner(bundle, allow_mismatch, warm_up=False)
    if bundle is None and costmodel is not None and config is not None:
        return untuned_planner(costmodel, load_config(config))
    raise RoutePackError("Give either --bundle, or --costmodel together with --config.")


@app.command()
def check(
    bundle: Annotated[str, Argument(help="Folder that `routepack deploy` wrote, or models:/NAME@ALIAS.")],
    steps: Annotated[list[str], Argument(metavar="STEPS...", help="Recent step batches: folders, files, globs.")],
    times: Annotated[Path | None, Option(help="Measured step times, CSV or JSON.")] = None,
    refit: Annotated[Path | None, Option(help="New bundle with times corrected by --times.")] = None,
    out: Annotated[Path | None, Option(help="The report as a JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Tell whether a bundle still fits; exits with 3 if not."""
    with ProgressBars() as bars:
        report = api.check(bundle, steps, times=times, refit=refit, out=out, observer=bars)
    _print(as_json, report.document(), summaries.drift_summary(report, refit))
    if report.refit_refused:
        raise RoutePackError(report.refit_refused)
    raise Exit(0 if report.verdict == "fits" else 3)


@app.command()
def rollback(
    name: Annotated[str, Argument(help="Registered planner.")],
    tracking_uri: Annotated[str | None, Option(help="MLflow store; default: MLFLOW_TRACKING_URI.")] = None,
    as_json: Json = False,
) -> None:
    """Make a registered planner's earlier version champion again."""
    done = api.rollback(name, tracking_uri)
    text = f"models:/{name}@champion is version {done.champion} again; @previous is version {done.previous or '-'}"
    _print(as_json, {"name": name, "champion": done.champion, "previous": done.previous or None}, text)


@app.command()
def quickstart(
    out: Annotated[Path, Option(help="Folder of everything it makes.")] = Path("routepack-quickstart"),
    as_json: Json = False,
) -> None:
    """Run the whole path on a bundled synthetic example."""
    from routepack_tune.quickstart import quickstart as run

    with ProgressBars() as bars:
        result = run(out, observer=bars)
    if as_json:
        _print(True, facts.quickstart_facts(result), "")
    else:
        summaries.print_quickstart(result)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(installed_version())
        raise Exit


class _Notes(logging.Handler):
    """Print what is logged as one line each on stderr, every text once."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        kind = "Warning" if record.levelno >= logging.WARNING else "Note"
        line = f"{kind}: {' '.join(record.getMessage().split())}"
        if line not in self._shown:
            self._shown.add(line)
            print(line, file=sys.stderr)


@contextmanager
def _plain_notes() -> Iterator[None]:
    """Show notes and warnings for people while a verb runs."""
    notes, logger = _Notes(), logging.getLogger("routepack_tune")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: logger.warning("%s", message)
        logger.addHandler(notes)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(notes)
            logger.setLevel(level)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        with _plain_notes():
            app(args=None if arguments is None else list(arguments), prog_name="routepack")
            return 0
    except RoutePackError as error:
        message = str(error)
    except OSError as error:
        if error.filename is None and error.errno not in NO_ROOM:
            raise
        where = f"{error.filename}: " if error.filename else ""
        message = f"{where}{error.strerror}. Choose another path, or make room or rights there."
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if code == 130:
            print("Interrupted; the same command continues what profile and tune have finished.", file=sys.stderr)
        return code
    print(f"Error: {' '.join(message.split())}", file=sys.stderr)
    return 1
