"""The command ``routepack``: eight verbs, few flags; everything else is in ``routepack.yaml``.

Expected failures print one line ``Error: ...`` on stderr and exit with 1, bad usage exits with 2; bugs keep their
traceback.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from profiler.errors import RoutePackError
from routepack_tune import api, summaries
from routepack_tune.progress import ProgressBars, is_first_rank

app = typer.Typer(
    name="routepack",
    help="Plan MoE reinforcement-learning steps: balance attention and experts together, from learned times.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

ConfigOption = Annotated[Path, typer.Option("--config", help="routepack.yaml: model, topology, token cap, sections.")]


@app.command()
def profile(
    config: ConfigOption,
    out: Annotated[Path, typer.Option(help="Folder of the measurements; an interrupted one is continued.")],
    published: Annotated[Path | None, typer.Option(help="Import public timing tables from here instead.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    prior: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="Cost model of a sibling device: fewer cases do.")
    ] = None,
    steps: Annotated[
        list[str] | None, typer.Option(help="Your step batches (folder, file or glob): what is timed first.")
    ] = None,
    target_error: Annotated[
        float | None, typer.Option(metavar="PCT", help="Stop when held-out median errors are below.")
    ] = None,
    max_minutes: Annotated[
        float | None, typer.Option(metavar="MIN", help="Stop after so many minutes; 0: no limit.")
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="Draw the profile into the folder.")] = False,
) -> None:
    """Time a training step's operations on this device, or import published times."""
    with ProgressBars() as bars:
        found = api.profile(
            config, out, published=published, device=device, observer=bars, prior=prior or (), steps=steps or (),
            target_error=target_error, max_minutes=max_minutes, report=report,
        )  # fmt: skip
    if is_first_rank():
        print(summaries.measurements_summary(found, out))


@app.command()
def fit(
    measurements: Annotated[list[Path], typer.Argument(help="Folder(s) that `routepack profile` wrote.")],
    config: ConfigOption,
    out: Annotated[Path, typer.Option(help="Folder of the cost model.")],
    prior: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="Cost model of a sibling GPU; may be given several times.")
    ] = None,
) -> None:
    """Learn times of any size from measurements and freeze them into tables."""
    with ProgressBars() as bars:
        model = api.fit(measurements, config, out, observer=bars, priors=prior or ())
    print(summaries.cost_model_summary(model, out))


@app.command()
def tune(
    steps: Annotated[list[str], typer.Argument(metavar="STEPS_DIR", help="Step batches: a folder, files or a glob.")],
    costmodel: Annotated[Path, typer.Option(help="Folder that `routepack fit` wrote.")],
    config: ConfigOption,
    out: Annotated[Path, typer.Option(help="Folder of the study; an interrupted one is continued.")],
    trials: Annotated[int, typer.Option(min=1, help="Total number of trials, finished ones included.")] = 20,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Processes of this machine.")] = 1,
    storage: Annotated[
        str | None, typer.Option(help="Optuna URL of a server, for several machines; default: a file in the study.")
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Run the workers as tasks of a Ray cluster.")] = False,
    new_study: Annotated[bool, typer.Option("--new-study", help="Begin afresh; the earlier study is kept.")] = False,
    warm_start: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="Study or bundle whose best settings are tried first.")
    ] = None,
) -> None:
    """Tune the planner's settings on step batches, part of them held out."""
    with ProgressBars() as bars:
        done = api.tune(
            steps, costmodel, config, out, trials=trials, storage=storage, observer=bars, workers=workers, ray=ray,
            new_study=new_study, warm_start=warm_start or (),
        )  # fmt: skip
    print(summaries.study_summary(done, out))


@app.command()
def deploy(
    study: Annotated[Path, typer.Argument(help="Folder that `routepack tune` wrote.")],
    out: Annotated[Path, typer.Option(help="Folder of the bundle.")],
    register: Annotated[str | None, typer.Option(metavar="NAME", help="Also register it in MLflow.")] = None,
) -> None:
    """Turn a study's best trial into the bundle that training loads."""
    print(summaries.bundle_summary(api.deploy(study, out, register=register), register))


@app.command()
def rollback(
    name: Annotated[str, typer.Argument(help="Registered planner.")],
    tracking_uri: Annotated[str | None, typer.Option(help="MLflow store; default: MLFLOW_TRACKING_URI.")] = None,
) -> None:
    """Make a registered planner's earlier version the champion again."""
    done = api.rollback(name, tracking_uri)
    print(f"models:/{name}@champion is version {done.champion} again; @previous is version {done.previous or '-'}")


@app.command()
def check(
    bundle: Annotated[str, typer.Argument(help="Folder that `routepack deploy` wrote, or models:/NAME@ALIAS.")],
    steps: Annotated[list[str], typer.Argument(metavar="STEPS...", help="Recent step batches: folders, files, globs.")],
    times: Annotated[Path | None, typer.Option(help="Measured step times, CSV or JSON.")] = None,
    refit: Annotated[Path | None, typer.Option(help="New bundle with times corrected by --times.")] = None,
    out: Annotated[Path | None, typer.Option(help="The report as a JSON file.")] = None,
) -> None:
    """Tell whether a bundle still fits recent steps; exits with 3 where something is to be done."""
    with ProgressBars() as bars:
        report = api.check(bundle, steps, times=times, refit=refit, out=out, observer=bars)
    print(summaries.drift_summary(report, refit))
    if report.refit_refused:
        raise RoutePackError(report.refit_refused)
    raise typer.Exit(report.exit_code)


@app.command()
def plan(
    step: Annotated[Path, typer.Argument(metavar="STEP.npz", help="The step batch.")],
    out: Annotated[Path, typer.Option(help="The plan to write, JSON.")],
    bundle: Annotated[Path | None, typer.Option(help="Folder that `routepack deploy` wrote.")] = None,
    costmodel: Annotated[Path | None, typer.Option(help="Instead of a bundle, with --config.")] = None,
    config: Annotated[Path | None, typer.Option(help="Instead of a bundle, with --costmodel.")] = None,
    previous: Annotated[Path | None, typer.Option(help="Last step's plan: experts move only where it pays.")] = None,
    max_runtime: Annotated[float | None, typer.Option(metavar="S", help="Stop after so many seconds.")] = None,
    max_iterations: Annotated[int | None, typer.Option(metavar="N", help="Stop after so many proposals.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Equal input, settings and seed give an equal plan.")] = 0,
    allow_mismatch: Annotated[bool, typer.Option("--allow-mismatch", help="Use a bundle of another device.")] = False,
) -> None:
    """Plan one step batch."""
    with ProgressBars() as bars:
        made = api.plan(
            step, out, bundle=bundle, costmodel=costmodel, config=config, previous=previous, max_runtime=max_runtime,
            max_iterations=max_iterations, seed=seed, allow_mismatch=allow_mismatch, observer=bars,
        )  # fmt: skip
    print(summaries.plan_summary(made, out))


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="Folder of everything it makes.")] = Path("routepack-quickstart"),
) -> None:
    """Run the whole path on this machine with a bundled synthetic example."""
    from routepack_tune.quickstart import quickstart as run

    with ProgressBars() as bars:
        result = run(out, observer=bars)
    summaries.print_quickstart(result)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(api.version())
        raise typer.Exit


class _Notes(logging.Handler):
    """Print warnings and what the packages log as one line each on stderr, every text once."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self._print("Note", record.getMessage())

    def warn(self, message: Warning | str, *_: Any, **__: Any) -> None:
        """Stand in for ``warnings.showwarning``."""
        self._print("Warning", str(message))

    def _print(self, kind: str, text: str) -> None:
        line = f"{kind}: {' '.join(text.split())}"
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
        warnings.showwarning = notes.warn
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
    except RoutePackError as error:
        return _fail(str(error))
    except OSError as error:
        if error.filename is None:
            raise
        return _fail(f"{error.filename}: {error.strerror}. Choose another path, or make room or rights there.")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if code == 130:
            print("Interrupted; the same command continues what profile and tune have finished.", file=sys.stderr)
        return code
    return 0


def _fail(message: str) -> int:
    print(f"Error: {' '.join(message.split())}", file=sys.stderr)
    return 1
