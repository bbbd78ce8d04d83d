"""Places: whole or absent, one writer, nothing left of the dead, never a gap."""

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from profiler import RoutePackError, places
from profiler.files import write_text
from profiler.places import check_place, claimed, clear_leftovers, new_folder, read_folder, temporary_name

ROOT = Path(__file__).parents[2]


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


def process(code: str, *arguments: object) -> subprocess.Popen:
    text = "import sys, time\nfrom pathlib import Path\n" + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", text, *map(str, arguments)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def test_the_umask_of_the_process_holds(tmp_path):
    code = "import os, sys; os.umask(0o007); from profiler.places import new_folder; from profiler.files import *\n"
    code += "write_text(sys.argv[1] + '/a', 'x')\nwith new_folder(sys.argv[1] + '/b') as new: pass"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in "ab"] == [0o660, 0o770]


KILLED = """
from profiler.places import new_folder, temporary_name
out = Path(sys.argv[1])
with new_folder(out) as new:
    (new / "half").write_text("")
    temporary_name(out.parent / "f.json").write_text("half")
    print("ready", flush=True)
    time.sleep(600)
"""


def test_what_a_killed_process_left_is_cleared_by_the_next_and_not_what_a_living_one_makes(tmp_path):
    writer = process(KILLED, tmp_path / "out")
    assert writer.stdout.readline() == "ready\n"
    write_text(tmp_path / "f.json", "{}")
    with new_folder(tmp_path / "out"):
        pass
    assert len([path for path in tmp_path.iterdir() if path.suffix == ".tmp"]) == 2
    writer.kill()
    writer.wait()
    write_text(tmp_path / "f.json", "{}")
    with new_folder(tmp_path / "out"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.json", "out"]


def test_a_folder_that_a_killed_process_had_moved_away_comes_back(tmp_path):
    gone = process("")
    gone.wait()
    name = temporary_name(tmp_path / "out").name.replace(f"-{os.getpid()}-", f"-{gone.pid}-")
    (old := (tmp_path / name).with_suffix(".old")).mkdir()
    (old / "planner.yaml").write_text("old")
    clear_leftovers(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_is_replaced_where_names_can_be_exchanged_and_where_not(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(places, "_exchanged", lambda *_: False)
    for text in ("1", "2"):
        with new_folder(tmp_path / "out") as new:
            (new / "a").write_text(text)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "a").read_text() == "2"


REPLACING = """
from profiler.places import new_folder
print("ready", flush=True)
for i in range(400):
    with new_folder(sys.argv[1]) as new:
        (new / "a").write_text(str(i))
        (new / "b").write_text(str(i))
"""


def test_readers_never_meet_a_gap_or_a_mix(tmp_path):
    out, met = tmp_path / "out", 0

    def both():
        try:
            one, other = (out / "a").read_text(), (out / "b").read_text()
        except OSError as error:
            raise RoutePackError(str(error)) from None
        if one != other:
            raise RoutePackError(f"{one} and {other}")
        return one

    with new_folder(out) as new:
        (new / "a").write_text("")
        (new / "b").write_text("")
    writer = process(REPLACING, out)
    writer.stdout.readline()
    while writer.poll() is None:
        read_folder(out, both)
        met += 1
    assert read_folder(out, both) == "399"
    assert met > 100


def test_what_is_wrong_for_good_is_said_at_once(tmp_path):
    tried = []

    def read():
        tried.append(1)
        raise RoutePackError("damaged")

    with pytest.raises(RoutePackError, match="damaged"):
        read_folder(tmp_path, read)
    assert len(tried) == 1


CLAIMING = """
from profiler.places import claimed
with claimed(sys.argv[1], "fitting into"):
    print("ready", flush=True)
    time.sleep(600)
"""


def test_a_place_has_one_writer_and_a_kill_lets_go(tmp_path):
    holder = process(CLAIMING, tmp_path / "out")
    holder.stdout.readline()
    with (
        pytest.raises(RoutePackError, match=r"Another process is fitting into .*out\. Wait"),
        claimed(tmp_path / "out", "fitting into"),
    ):
        pass
    holder.kill()
    holder.wait()
    with claimed(tmp_path / "out", "fitting into"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_file_systems_without_locks_are_named_and_work(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(UserWarning, match="knows no locks"), claimed(tmp_path / "out", "fitting into"):
        pass


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES])
def test_what_the_system_refuses_names_the_file_that_was_asked_for(tmp_path, monkeypatch, code):
    def full(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RoutePackError, match=rf"a\.json cannot be written: {os.strerror(code)}") as caught:
        write_text(tmp_path / "a.json", "x")
    assert ("Make room" in str(caught.value)) == (code in places.NO_ROOM)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RoutePackError, match=r"^/proc/a cannot be written"), new_folder("/proc/a"):
        pass
