"""Progress bars: on terminals only, they say what runs, and what is done stands full with its time."""

from __future__ import annotations

import io
import re

import pytest

from routepack_tune.cli import main
from routepack_tune.progress import ProgressBars


def test_bars_are_drawn_on_terminals_only(capsys, monkeypatch):
    def work(bars):
        with bars:
            bars.start("fit", 2)
            bars.advance("fit", "experts")
            bars.advance("fit")
            bars.finish("fit")
            bars.finish("never started")

    work(ProgressBars())
    assert capsys.readouterr().err == ""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    work(ProgressBars())
    assert "fit" in terminal.getvalue()
    assert "2/2" in terminal.getvalue()
    # Of the processes of one job the first alone draws.
    other = Terminal()
    monkeypatch.setattr("sys.stderr", other)
    monkeypatch.setenv("RANK", "1")
    work(ProgressBars())
    assert other.getvalue() == ""


class Screen(io.StringIO):
    """A terminal; :attr:`lines` are those that stand on it now, without colours and bars."""

    def isatty(self):
        return True

    @property
    def lines(self):
        shown = [""]
        for part in re.split(r"(\n|\x1b\[1A|\x1b\[2K|\r)", self.getvalue()):
            if part == "\n":
                shown.append("")
            elif part == "\x1b[1A":
                shown.pop()
            elif part in ("\x1b[2K", "\r"):
                shown[-1] = "" if part == "\x1b[2K" else shown[-1]
            else:
                shown[-1] = shown[-1] + part
        plain = (re.sub(r"\x1b\[[0-9;?]*\w|[━╸╺]", "", line) for line in shown)
        return [" ".join(line.split()) for line in plain if line.strip()]


def watched(monkeypatch):
    """Return a terminal in the place of stderr; a fixture could not, pytest puts its own there before the test."""
    for name, value in {"TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    made = Screen()
    monkeypatch.setattr("sys.stderr", made)
    return made


def test_a_bar_says_what_runs_and_ends_full_with_its_time(monkeypatch):
    screen = watched(monkeypatch)
    with ProgressBars() as bars:
        bars.start("quickstart", 3)
        bars.now("quickstart", "fit")
        bars.start("batches", 9)
        bars.advance("batches", "step01")
        bars.finish("batches")
        bars._bars.refresh()
        assert [line.replace("0:00:01", "0:00:00") for line in screen.lines] == [
            "quickstart 0/3 0:00:00 fit", "batches 1/1 0:00:00"]  # fmt: skip
        for _ in range(3):
            bars.advance("quickstart")
    assert [line.split()[:2] for line in screen.lines] == [["quickstart", "3/3"], ["batches", "1/1"]]


def test_an_error_leaves_bars_as_they_stand(monkeypatch):
    screen = watched(monkeypatch)

    def broken(bars):
        bars.start("trials", 9)
        bars.advance("trials")
        try:
            raise ZeroDivisionError
        finally:
            bars.finish("trials")

    with pytest.raises(ZeroDivisionError), ProgressBars() as bars:
        broken(bars)
    assert screen.lines[0].startswith("trials 1/9")


def test_a_plan_ends_with_a_full_bar(monkeypatch, job):
    screen, out = watched(monkeypatch), job.folder / "plan.json"
    given = ("plan", job.step, "--costmodel", job.costmodel, "--config", job.config, "--out", out)
    assert main([str(argument) for argument in given]) == 0
    assert [line.split()[:2] for line in screen.lines] == [["plan", "1/1"]]
