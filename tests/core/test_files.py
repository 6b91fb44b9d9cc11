"""Writing: what stands at a path decides how; what cannot be written, or must not, is refused before any work."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from vkernel.core.errors import InputError, shown
from vkernel.core.files import check_outputs, make_folder, write, write_json


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, which is the home too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def nothing_else(folder: Path, *names: str) -> None:
    assert sorted(p.name for p in folder.iterdir()) == sorted(names)


@pytest.mark.parametrize(("umask", "new"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_modes_follow_the_umask_or_the_old_file(here: Path, umask: int, new: int) -> None:
    before = os.umask(umask)
    try:
        assert mode(write("a.json", "1")) == new
        Path("a.json").chmod(0o640)
        if os.geteuid() == 0:
            os.chown("a.json", 1234, 4321)
        assert mode(write("a.json", "2")) == 0o640
        if os.geteuid() == 0:
            assert (Path("a.json").stat().st_uid, Path("a.json").stat().st_gid) == (1234, 4321)
    finally:
        os.umask(before)
    assert Path("a.json").read_text() == "2"
    nothing_else(here, "home", "a.json")


def test_links_are_followed(here: Path) -> None:
    Path("deep").mkdir()
    Path("deep/real").write_text("old")
    Path("one").symlink_to("deep/real")
    Path("two").symlink_to("one")
    Path("hard").hardlink_to("deep/real")
    Path("dangling").symlink_to("deep/new")
    write("two", "new")
    write("dangling", "made")
    assert [Path(name).is_symlink() for name in ("one", "two", "dangling")] == [True] * 3
    assert Path("deep/real").read_text() == "new"
    assert Path("hard").read_text() == "old"  # another name of the old file keeps it
    assert Path("deep/new").read_text() == "made"
    Path("lost").symlink_to("nowhere/new")
    Path("loop").symlink_to("loop")
    for name in ("lost", "loop"):
        with pytest.raises(InputError, match=name):
            write(name, "")
        with pytest.raises(InputError, match=name):
            check_outputs({"--json": name}, ())


def test_pipes_devices_and_standard_output(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("pipe")
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(Path("pipe").read_bytes()))
    reader.start()
    check_outputs({"--json": "/dev/null", "--html": "/dev/null", "--out": "pipe"}, ())
    write("pipe", "through")
    write("/dev/null", "gone")
    reader.join(10)
    assert got == [b"through"]
    assert stat.S_ISFIFO(Path("pipe").stat().st_mode)
    assert Path("/dev/null").is_char_device()
    print("before")
    write("/dev/stdout", "within\n")
    print("after")
    assert capfd.readouterr().out == "before\nwithin\nafter\n"
    with socket.socket(socket.AF_UNIX) as held:
        held.bind("door")
        with pytest.raises(InputError, match="door is a socket"):
            check_outputs({"--json": "door"}, ())
    with pytest.raises(InputError, match="No space left"):
        write("/dev/full", "x")


def test_read_only_targets_stay(here: Path) -> None:
    """Also for root, whom the system would let write."""
    Path("kept").write_text("mine")
    Path("kept").chmod(0o444)
    Path("link").symlink_to("kept")
    Path("closed").mkdir()
    Path("closed/old").write_text("old")
    Path("closed").chmod(0o555)
    for name in ("kept", "link", "closed/new"):
        with pytest.raises(InputError, match="is read-only"):
            check_outputs({"--json": name}, ())
    for name in ("kept", "link"):
        with pytest.raises(InputError, match="is read-only"):
            write(name, "x")
    check_outputs({"--json": "closed/old"}, ())  # the file may be written, if not replaced
    write("closed/old", "new")
    assert (Path("kept").read_text(), Path("closed/old").read_text()) == ("mine", "new")


def test_folders_are_made_below_others(here: Path) -> None:
    assert write("~/a/b/c.json", "1") == here / "home/a/b/c.json"
    assert (here / "home/a/b/c.json").read_text() == "1"
    assert write(Path("out/sub/x.html"), b"2").read_bytes() == b"2"
    assert make_folder("x/y").is_dir()
    top = Path("/vkernel-test-no-such-folder")
    Path("away").symlink_to(top)
    for name in (top / "x.html", "away/x.html", top / "deep/x.html"):
        for refuse in (lambda p: write(p, ""), lambda p: check_outputs({"--html": p}, ())):
            with pytest.raises(InputError, match="none is made in /"):
                refuse(name)
    with pytest.raises(InputError, match="none is made in /"):
        make_folder(top)
    assert not top.exists()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("home", "is a folder"),
        ("", "is a folder"),
        ("file/x", "file is a file, not a folder"),
        ("a\0b", "zero byte"),
        ("x" * 300, "too long"),
        ("new/" + "x" * 300, "longer than"),
        ("~nobody-of-this-name/x", "home folder"),
        ("/proc/self/x.json", "read-only|Cannot write"),
    ],
)
def test_names_that_cannot_be(name: str, why: str) -> None:
    Path("file").write_text("")
    with pytest.raises(InputError, match=why):
        check_outputs({"--json": name}, ())
    with pytest.raises(InputError):
        write(name, "")


def test_an_output_is_no_input_and_no_other_output(here: Path) -> None:
    Path("m.npy").write_bytes(b"data")
    Path("soft").symlink_to("m.npy")
    Path("hard").hardlink_to("m.npy")
    Path("images/more").mkdir(parents=True)
    Path("images/more/1.png").write_bytes(b"1")
    Path("images/back").symlink_to("../images")
    Path("elsewhere").mkdir()
    Path("elsewhere/2.png").write_bytes(b"2")
    Path("images/2.png").symlink_to("../elsewhere/2.png")
    inputs = ["m.npy", None, "toy:digits", "~who", "images", "x" * 300]
    for name in ("m.npy", "./home/../m.npy", here / "m.npy", "soft", "hard", "images/more/1.png", "elsewhere/2.png"):
        with pytest.raises(InputError, match=r"--json .* would overwrite what is read: it (is|lies in)"):
            check_outputs({"--json": name}, inputs)
    Path("same").symlink_to("a.json")
    for one, two in (("a.json", "./a.json"), ("a.json", "same"), ("soft", "m.npy"), ("soft", "hard")):
        with pytest.raises(InputError, match="are one file"):
            check_outputs({"--json": one, "--html": two}, ())
    with pytest.raises(InputError, match="a folder and a file"):
        check_outputs({"--json": "a", "--html": "a/b.html"}, ())
    check_outputs({"--json": "images/r.json", "--html": "images/r.html"}, inputs)
    write_json("images/r.json", {"n": 1})
    write("images/r.html", "<html>")
    check_outputs({"--json": "images/r.json", "--html": "images/r.html"}, inputs)  # results are no data
    nothing_else(here / "images", "2.png", "back", "more", "r.html", "r.json")


def test_texts_for_people() -> None:
    assert shown("σ ± [red]é\u00a0") == "σ ± [red]é\u00a0"
    assert shown("a\x1b[31m\n\x7f\u202e") == "a\\x1b[31m\\x0a\\x7f\\u202e"
    assert shown(os.fsdecode(b"m\xe9")) == "m\\xe9"
    assert str(InputError("No a\x1b[31m  b,\n    c.")) == "No a\\x1b[31m  b, c."
    assert write("x", os.fsdecode(b"m\xe9")).read_text()  # no name prevents a page


def test_a_file_without_a_name_is_written_to(here: Path) -> None:
    with tempfile.TemporaryFile(dir=here) as file:
        path = f"/proc/self/fd/{file.fileno()}"
        check_outputs({"--json": path}, [here])
        write(path, "result")
        assert file.read() == b"result"
    nothing_else(here, "home")
