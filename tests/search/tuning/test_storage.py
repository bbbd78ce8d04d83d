"""Storages are chosen, opened at once by many, refused when they hold other inputs, and whole after a kill."""

import contextlib
import multiprocessing
import warnings
from dataclasses import replace

import pytest
from patience import PATIENCE_S
from small_tasks import make_task, warm_processes

from profiler import RoutePackError
from search import PlannerParams
from search.tuning.storage import ServerLocks, _connect, open_study
from search.tuning.task import difference

optuna = pytest.importorskip("optuna")


def test_the_given_settings_are_tried_first(tmp_path):
    task = replace(make_task(), enqueue=({"starts": 3},))
    study = open_study(task, f"journal:{tmp_path}/j", "s")
    open_study(task, f"journal:{tmp_path}/j", "s")  # resuming enqueues nothing more
    assert [t.system_attrs["fixed_params"] for t in study.trials] == task.given_settings


@pytest.mark.parametrize("two_objectives", [False, True])
def test_a_reader_of_the_storage_finds_names_and_plain_facts(tmp_path, two_objectives):
    where = f"journal:{tmp_path}/j"
    with warnings.catch_warnings(action="error"):
        open_study(make_task(two_objectives=two_objectives), where, "s")
    study = optuna.load_study(study_name="s", storage=_connect(where))
    names = ["step time / default settings", "planning time / default settings"]
    assert study.metric_names == (names if two_objectives else ["cost / default settings"])
    facts = {name: told for name, told in study.user_attrs.items() if name != "signature"}
    assert facts["tuned on"] == "step0, step1, step2"
    assert facts["held out"] == "step3"
    assert facts["microbatch caps"] == "64 tokens"
    assert all(isinstance(told, str) and "{" not in told for told in facts.values())


def test_the_folder_of_a_journal_is_made(tmp_path):
    study = open_study(make_task(), f"journal:{tmp_path}/not/there/j", "s")
    assert open_study(make_task(), f"journal:{tmp_path}/not/there/j", "s").user_attrs == study.user_attrs


def test_a_server_takes_a_silent_machine_for_dead_within_a_minute(postgresql):
    import psycopg

    with psycopg.connect(postgresql, options=ServerLocks.NOTICE) as connection:
        names = ("idle", "interval", "count")
        idle_s, interval_s, count = (int(connection.execute(f"show tcp_keepalives_{n}").fetchone()[0]) for n in names)
    assert 0 < idle_s + interval_s * count <= 60


@pytest.mark.parametrize("two_objectives", [False, True])
def test_other_inputs_are_refused_with_the_difference(tmp_path, two_objectives):
    storage, task = f"journal:{tmp_path}/j", make_task()
    open_study(task, storage, "s")
    other = make_task(batches=3, two_objectives=two_objectives)
    other = replace(other, names=("step0", "step1", "last"), base=PlannerParams(max_iterations=9000, starts=5))
    with pytest.raises(RoutePackError) as error:
        open_study(other, storage, "s")
    text = str(error.value)
    assert "step batches: added last, removed step2, step3" in text
    assert "starts: changed high 4 -> 5" in text
    assert "max_iterations 1000 -> 9000" in text
    assert "--new-study" in text
    assert ("directions" in text) == two_objectives


def test_a_new_study_gets_the_next_free_name_and_leaves_the_old_one(tmp_path):
    storage = f"journal:{tmp_path}/j"
    names = [open_study(make_task(batches=n), storage, "s", new_study=True).study_name for n in (3, 4, 5)]
    assert names == ["s", "s-2", "s-3"]
    assert open_study(make_task(batches=3), storage, "s").study_name == "s"


def test_differences_in_words():
    assert difference("seed", 0, 1) == "seed 0 -> 1"
    assert difference("tables", "a" * 64, "b" * 64) == "tables aaaaaaaa -> bbbbbbbb"
    many = difference("batches", {}, {f"s{i}": "x" for i in range(6)})
    assert many == "batches: added s0, s1, s2, s3 and 2 more"


@pytest.mark.parametrize(
    ("storage", "why"),
    [
        ("sqlite:////nonexistent/folder/x.db", "not known"),
        ("nonsense://me:hidden@host/db", "not known"),
        ("postgresql//me:hidden@host", "cannot be opened"),
        ("postgresql://me:hidden@127.0.0.1:1/db", "cannot be opened"),
    ],
)
def test_a_storage_that_cannot_be_opened_is_one_line(storage, why):
    if storage.startswith("postgresql://"):
        pytest.importorskip("psycopg")
    with pytest.raises(RoutePackError, match=why) as error:
        open_study(make_task(), storage, "s")
    assert "\n" not in str(error.value)
    assert "hidden" not in str(error.value)


def test_a_database_of_another_optuna_is_refused_with_the_way_out(postgresql):
    import psycopg

    open_study(make_task(), postgresql, "s")
    with psycopg.connect(postgresql) as database:
        database.execute("update alembic_version set version_num = 'v0.9.0.a'")
    with pytest.raises(RoutePackError, match="optuna storage upgrade"):
        open_study(make_task(), postgresql, "s")


def test_a_line_that_a_kill_left_half_is_cut_off(tmp_path):
    storage = f"journal:{tmp_path}/j"
    study = open_study(make_task(), storage, "s")
    study.tell(study.ask(), 1.0)
    with open(tmp_path / "j", "ab") as journal:
        journal.write(b'{"op_code":4,"work')
    study = open_study(make_task(), storage, "s")
    study.tell(study.ask(), 2.0)
    assert [t.value for t in open_study(make_task(), storage, "s").trials] == [1.0, 2.0]


def _open_all(storages, barrier):
    for storage in storages:
        barrier.wait(PATIENCE_S)
        study = open_study(make_task(), storage, "s")
        study.set_user_attr(f"was here {multiprocessing.current_process().name}", True)


def test_processes_that_create_the_same_study_at_once_all_survive(tmp_path, request):
    """FC-43."""
    storages = [f"journal:{tmp_path}/j"]
    with contextlib.suppress(pytest.skip.Exception):
        storages.append(request.getfixturevalue("postgresql"))
    context, count = warm_processes(), 4
    barrier = context.Barrier(count)
    crew = [context.Process(target=_open_all, args=(storages, barrier)) for _ in range(count)]
    for process in crew:
        process.start()
    for process in crew:
        process.join(180)
    assert [process.exitcode for process in crew] == [0] * count
    for storage in storages:
        study = open_study(make_task(), storage, "s")
        assert sum(key.startswith("was here") for key in study.user_attrs) == count
        assert len(study.trials) == 1
