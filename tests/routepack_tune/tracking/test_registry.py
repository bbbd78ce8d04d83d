"""The registry: a champion, the one before it, and the way back, in a real MLflow store."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sqlite3

import pytest

from profiler import RoutePackError
from routepack_tune import deploy, load_planner, tune
from routepack_tune.bundle import write_bundle
from routepack_tune.cli import main
from routepack_tune.tracking import database
from routepack_tune.tracking.registry import (
    CHAMPION,
    PREVIOUS,
    RolledBack,
    download_bundle,
    planner_signature,
    promote,
    register_bundle,
    rollback,
)
from routepack_tune.tracking.store import own_uri, quiet_mlflow, tracking_at


@pytest.fixture
def registry(study_template, tmp_path):
    """A copy of a store that exists, its client and its URI: making one takes seconds."""
    shutil.copy(study_template.folder / "study" / "mlflow.db", tmp_path / "mlflow.db")
    uri = own_uri(tmp_path)
    return quiet_mlflow().MlflowClient(tracking_uri=uri, registry_uri=uri), uri


def aliases(client, name):
    return {alias: str(version) for alias, version in client.get_registered_model(name).aliases.items()}


def test_registering_moves_both_aliases_and_a_rollback_exchanges_them(registry):
    client, uri = registry
    client.create_registered_model("tiny")
    for number in (1, 2, 3):
        client.create_model_version("tiny", source=uri)
        promote(client, "tiny", str(number))
        promote(client, "tiny", str(number))  # a second time changes nothing
        expected = {CHAMPION: str(number)} | ({PREVIOUS: str(number - 1)} if number > 1 else {})
        assert aliases(client, "tiny") == expected
    assert rollback("tiny", uri) == RolledBack(champion="2", previous="3")
    assert aliases(client, "tiny") == {CHAMPION: "2", PREVIOUS: "3"}
    assert rollback("tiny", uri) == RolledBack(champion="3", previous="2")
    assert aliases(client, "tiny") == {CHAMPION: "3", PREVIOUS: "2"}


def test_rollback_says_why_it_cannot(registry, tmp_path, monkeypatch):
    client, uri = registry
    with pytest.raises(RoutePackError, match=r"holds no planner 'nobody'\. Registered there: nothing"):
        rollback("nobody", uri)
    client.create_registered_model("one")
    with pytest.raises(RoutePackError, match=r"'one'.*no version to go back to.*no version at all"):
        rollback("one", uri)
    client.create_model_version("one", source=uri)
    promote(client, "one", "1")
    with pytest.raises(RoutePackError, match=r"@champion is 1, @previous is not set, versions 1"):
        rollback("one", uri)
    assert aliases(client, "one") == {CHAMPION: "1"}
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(RoutePackError, match="Give --tracking-uri or set MLFLOW_TRACKING_URI"):
        rollback("one")
    with pytest.raises(RoutePackError, match="folder store"):
        rollback("one", "./mlruns")
    with pytest.raises(RoutePackError, match="is no file"):
        rollback("one", f"sqlite:///{tmp_path}/typo.db")
    assert not (tmp_path / "typo.db").exists()


def test_rollback_names_what_is_registered(registry):
    client, uri = registry
    for name in ("my-job", "it's mine", "other"):
        client.create_registered_model(name)
    for typo, meant in (("my-jobb", "my-job"), ("myjob", "my-job"), ("My-Job", "my-job"), ("its mine", "it's mine")):
        with pytest.raises(RoutePackError) as caught:
            rollback(typo, uri)
        assert f'Did you mean "{meant}"? ' in str(caught.value).replace(repr(meant), f'"{meant}"')
        assert "Registered there: it's mine, my-job, other." in str(caught.value)
    with pytest.raises(RoutePackError, match="Registered there: it's mine, my-job, other") as caught:
        rollback("quite something else", uri)
    assert "Did you mean" not in str(caught.value)
    with pytest.raises(RoutePackError, match="no version to go back to"):
        rollback("it's mine", uri)


def test_rollback_finds_the_store_in_the_environment(registry, monkeypatch):
    client, uri = registry
    client.create_registered_model("tiny")
    for number in (1, 2):
        client.create_model_version("tiny", source=uri)
        promote(client, "tiny", str(number))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert rollback("tiny").champion == "1"


def test_rollback_without_a_server_is_one_line(tmp_path):
    with pytest.raises(RoutePackError, match=r"could not roll back 'tiny'.*try again") as caught:
        rollback("tiny", "http://me:secret@127.0.0.1:9")
    assert "secret" not in str(caught.value)


def test_loading_makes_no_store_and_mends_a_half_made_one(tmp_path, monkeypatch):
    path = tmp_path / "mlflow.db"
    monkeypatch.setattr(database, "QUIET_S", 0.0)
    with tracking_at(quiet_mlflow(), own_uri(tmp_path)):
        with pytest.raises(RoutePackError, match=r"mlflow.db is no file.*Set MLFLOW_TRACKING_URI"):
            load_planner("models:/tiny@champion")
        assert not path.exists()
        with contextlib.closing(sqlite3.connect(path)) as opened:
            opened.execute("CREATE TABLE _alembic_tmp_experiments (experiment_id INTEGER)")
        with pytest.raises(RoutePackError, match=r"champion cannot be had: sqlite.*no planner .tiny"):
            load_planner("models:/tiny@champion")


def test_registered_bundle_resolves_by_alias_and_is_the_same(study_template, small_ranges, tmp_path, capsys):
    job = study_template
    study = tmp_path / "own"
    tune(job.steps, job.costmodel, job.config, study, trials=1)
    assert main(["deploy", str(study), "--out", str(tmp_path / "bundle"), "--register", "tiny"]) == 0
    captured = capsys.readouterr()
    assert "models:/tiny@champion" in captured.out
    assert "Registered as version 1 of tiny, the champion now." in captured.err
    mlflow = quiet_mlflow()
    with tracking_at(mlflow, own_uri(study)):
        version = mlflow.MlflowClient().get_model_version_by_alias("tiny", "champion")
        assert int(version.version) == 1
        assert version.run_id == json.loads((study / "study.json").read_text())["tracking"]["run_id"]
        loaded = load_planner("models:/tiny@champion")
        entry = {"name": "tiny", "version": "1", "alias": "champion"}
        assert loaded.provenance["registry"] == loaded.plan(job.step).provenance["registry"] == entry
        model = mlflow.pyfunc.load_model("models:/tiny@champion")
        planned = model.predict([str(job.step)])
        signature = mlflow.models.get_model_info("models:/tiny@champion").signature
        copy = tmp_path / "copy"
        mlflow.artifacts.download_artifacts(artifact_uri="models:/tiny@champion", dst_path=str(copy))
        with pytest.raises(RoutePackError, match="nobody"):
            load_planner("models:/nobody@champion")
    assert signature.inputs.to_dict() == planner_signature().inputs.to_dict()
    assert signature.outputs.to_dict() == planner_signature().outputs.to_dict()
    expected = load_planner(tmp_path / "bundle")
    assert loaded.plan(job.step).plan_hash == expected.plan(job.step).plan_hash == planned[0]["plan_hash"]
    for name in ("planner.yaml", "tables.npz"):
        assert (copy / "artifacts" / "bundle" / name).read_bytes() == (tmp_path / "bundle" / name).read_bytes()
    assert not list(copy.rglob("*.pkl"))
    registered_again(study, tmp_path / "bundle", mlflow.MlflowClient(own_uri(study), own_uri(study)))


def registered_again(study, bundle, client):
    """Versions tell what they are, and one planner has one version."""
    document, uri = json.loads((study / "study.json").read_text()), own_uri(study)
    version = client.get_model_version("tiny", "1")
    assert version.tags["model"] == "tiny"
    assert version.tags["export"] == "the default settings"
    assert version.tags["study"] == document["study_name"]
    assert version.tags["step and moves gain"] == "+0.00%"
    before, after = version.tags["step_time_s"].split(" -> ")
    assert before == after  # the defaults are exported
    for part in ("data parallel 2, expert model parallel 2", "at most 256 tokens", "load_planner(", "planning, s"):
        assert part in version.description
    assert "@champion" in client.get_registered_model("tiny").description
    told = register_bundle(bundle, "tiny", uri, document)
    assert told == "Version 1 of tiny is this planner already: no version was added, it stays the champion."

    planner, other = load_planner(bundle), bundle.with_name("other")
    tuned = dataclasses.replace(planner, params=dataclasses.replace(planner.params, max_iterations=7))
    write_bundle(other, tuned, planner.provenance)
    gone = {**document, "tracking": {**document["tracking"], "run_id": "0" * 32}}  # of a store that was made anew
    assert register_bundle(other, "tiny", uri, gone) == "Registered as version 2 of tiny, the champion now."
    assert client.get_run(client.get_model_version("tiny", "2").run_id).info.run_name == "bundle tiny"
    assert aliases(client, "tiny") == {CHAMPION: "2", PREVIOUS: "1"}
    assert "it is the champion now" in register_bundle(bundle, "tiny", uri, document)
    assert aliases(client, "tiny") == {CHAMPION: "1", PREVIOUS: "2"}
    assert rollback("tiny", uri) == RolledBack(champion="2", previous="1")
    assert len(client.search_model_versions("name='tiny'")) == 2


@pytest.fixture(scope="module")
def moved(study_template, tmp_path_factory):
    """A study whose bundle is registered as ``j``, then renamed; and where it was."""
    folder = tmp_path_factory.mktemp("moving")
    shutil.copytree(study_template.folder / "study", folder / "study")
    deploy(folder / "study", folder / "bundle", register="j")
    (folder / "study").rename(folder / "moved")
    return folder / "moved", folder / "study"


def load(uri, name, **how):
    with tracking_at(quiet_mlflow(), uri):
        return load_planner(name, warm_up=False, **how)


def test_a_copied_or_renamed_study_keeps_its_registry_and_writes_nowhere_else(moved, tmp_path):
    study, was = moved
    assert load(own_uri(study), "models:/j@champion").provenance["export"]
    assert not was.exists()
    shutil.copytree(study, tmp_path / "copy")
    document = json.loads((study / "study.json").read_text())
    for folder in (study, tmp_path / "copy"):  # the copy's original exists
        before = sorted(study.rglob("*")) if folder != study else []
        told = register_bundle(study.parent / "bundle", f"again-{folder.name}", own_uri(folder), document)
        assert "version 1" in told
        with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as opened:
            for table, column in database.ADDRESSES:
                places = {place for (place,) in opened.execute(f"SELECT {column} FROM {table}") if place}
                files = {place for place in places if place.startswith("file:")}
                assert all(place.startswith((folder / "artifacts").as_uri()) for place in files), table
        if before:
            assert sorted(study.rglob("*")) == before
    assert not was.exists()


def test_files_that_are_gone_are_named_with_the_way_out(moved, tmp_path):
    shutil.copy(moved[0] / "mlflow.db", tmp_path / "mlflow.db")
    shutil.move(moved[0] / "artifacts", moved[0] / "elsewhere")
    try:
        with pytest.raises(RoutePackError, match=r"files are missing, /.*artifacts.* beside its database") as caught:
            load(own_uri(tmp_path), "models:/j@champion")
        assert "\n" not in str(caught.value)
    finally:
        shutil.move(moved[0] / "elsewhere", moved[0] / "artifacts")


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("models:/j@prod", r"no alias @prod\. Its aliases: @champion \(version 1\); it has versions 1\."),
        ("models:/j@champoin", r"no alias @champoin\. Did you mean models:/j@champion\?"),
        ("models:/j/7", r"no version 7\. Its aliases: @champion \(version 1\); it has versions 1\."),
        ("models:/J@champion", r"holds no planner 'J'\. .*Registered there: .*j"),
        ("models:/jj/1", r"holds no planner 'jj'\. Did you mean 'j'\? Registered there: .*j"),
        ("models:/j", r"names no planner\. Give models:/NAME@ALIAS"),
        ("models:/j@champion/x", "names no planner"),
        ("models:/", "names no planner"),
    ],
)
def test_what_is_not_registered_is_answered_with_what_is(moved, uri, told):
    with pytest.raises(RoutePackError, match=told) as caught:
        load(own_uri(moved[0]), uri)
    assert "\n" not in str(caught.value)


def test_a_loaded_version_is_known_by_name_version_and_alias(moved):
    with tracking_at(quiet_mlflow(), own_uri(moved[0])):
        assert download_bundle("models:/j@champion")[1] == {"name": "j", "version": "1", "alias": "champion"}
        assert download_bundle("models:/j/1")[1] == {"name": "j", "version": "1", "alias": ""}


@pytest.mark.parametrize("name", ["", " ", "a/b", "a:b", "a@b", "..", "a'\"b", "a\nb", "x" * 201, "a ", "\udcff"])
def test_names_that_no_registry_can_hold_are_refused_before_any_work(study_template, tmp_path, name):
    with pytest.raises(RoutePackError, match="is no name for a planner"):
        deploy(study_template.folder / "study", tmp_path / "bundle", register=name)
    assert not (tmp_path / "bundle").exists()


def test_registering_leaves_no_run_running_and_no_end_changed(moved, monkeypatch):
    study = moved[0]
    document, uri = json.loads((study / "study.json").read_text()), own_uri(study)
    client = quiet_mlflow().MlflowClient(tracking_uri=uri, registry_uri=uri)
    run_id = document["tracking"]["run_id"]
    client.update_run(run_id, status="RUNNING")  # as a kill leaves it
    register_bundle(study.parent / "bundle", "j", uri, document)
    assert client.get_run(run_id).info.status == "FINISHED"
    with monkeypatch.context() as patch:
        patch.setattr("mlflow.pyfunc.log_model", lambda **_: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(RoutePackError, match=r"No space left.*deploy` again with that mended"):
            register_bundle(study.parent / "bundle", "full", uri, document)
    assert client.get_run(run_id).info.status == "FINISHED"
