import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from profiler import RoutePackError
from profiler.files import (
    arrays_hash,
    canonical_json,
    check_place,
    content_hash,
    new_folder,
    read_json,
    write_json,
    write_text,
)

ROOT = Path(__file__).parents[2]


def test_hashes_are_the_same_in_every_process():
    code = "from profiler.files import content_hash; print(content_hash({'b': [1, 2.5], 'a': 'x'}))"
    seen = set()
    for seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
        )
        seen.add(done.stdout.strip())
    assert seen == {content_hash({"a": "x", "b": [1, 2.5]})}


def test_not_a_number_cannot_be_written():
    with pytest.raises(ValueError):
        canonical_json({"x": float("nan")})


def test_array_hashes_see_names_types_and_shapes():
    array = np.arange(6)
    assert arrays_hash(a=array) == arrays_hash(a=array.copy())
    others = [arrays_hash(b=array), arrays_hash(a=array.astype(np.int32)), arrays_hash(a=array.reshape(2, 3))]
    assert arrays_hash(a=array) not in others


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    write_text(tmp_path / "a.json", "old")
    with pytest.raises(ValueError):
        write_json(tmp_path / "a.json", {"x": float("inf")})
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "old")]


def _half_write(folder):
    (folder / "b").write_text("2")
    raise InterruptedError


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
    with pytest.raises(InterruptedError), new_folder(tmp_path / "out") as folder:
        _half_write(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]
    with new_folder(tmp_path / "out") as folder:
        (folder / "c").write_text("3")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["c"]


def test_a_place_that_takes_nothing_is_refused_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "at all")
    for good, folder in (("file", False), ("new/deep.json", False), ("new/deep", True), (".", True)):
        check_place(tmp_path / good, folder)
    for path, folder, said in (
        (tmp_path, False, "is a folder, one file is"),
        (tmp_path / "file", True, "is a file, a folder is"),
        (tmp_path / "file" / "a", False, "cannot be written: .*file: Not a directory"),
        (tmp_path / "file" / "a" / "b", True, "cannot be written: .*file: Not a directory"),
        (tmp_path / "dangling", True, "neither a file nor a folder"),
        (tmp_path / ("x" * 300), False, "File name too long"),
        ("/proc/nothing/here", True, "cannot be written: /proc: No such file"),
        ("/dev/null", False, "neither a file nor a folder"),
    ):
        with pytest.raises(RoutePackError, match=f"^{path}.*{said}.*Choose another --out"):
            check_place(path, folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file"]


def test_what_goes_wrong_while_writing_names_the_file_that_was_asked_for(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_text(tmp_path / "a.json", "x")
    assert caught.value.filename == str(tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RoutePackError, match=r"^/proc/a cannot be written"), new_folder("/proc/a"):
        pass


def test_missing_and_broken_json_are_named(tmp_path):
    with pytest.raises(RoutePackError, match="Plan not found"):
        read_json(tmp_path / "absent.json", "Plan")
    (tmp_path / "broken.json").write_bytes(b'{"a": \xff')
    with pytest.raises(RoutePackError, match=r"broken\.json cannot be read"):
        read_json(tmp_path / "broken.json", "Plan")
