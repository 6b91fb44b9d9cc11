"""Nothing lost, nothing overwritten: outputs are checked first, files come before the screen, any stream will do."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from coarse import draw_coarsely
from command import Left
from rich.console import Group
from rich.table import Table
from rich.text import Text

from vkernel.cli import commands, common, streams

Run = Callable[..., Left]
Refused = Callable[..., str]
PROFILE = ("profile", "m.npy", "--queries", 8)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with a small data set, and pages without many dots."""
    monkeypatch.chdir(tmp_path)
    draw_coarsely(monkeypatch)
    np.save("m.npy", np.random.default_rng(0).normal(size=(12, 2)))
    return tmp_path


# --- outputs that are inputs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("profile m.npy --json m.npy", "would overwrite what is read: it is m.npy"),
        ("profile m.npy --html link.html", "would overwrite what is read"),
        ("profile m.npy --json r --html ./r", "are one file"),
        ("profile m.npy --json kept", "read-only"),
        ("profile m.npy --html /vkernel-test-nowhere/x.html", "none is made in /"),
        ("profile images --json images/1.png", "it lies in images"),
        ("audit w.pt --data m.npy --json w.pt", "it is w.pt"),
        ("audit w.pt v.pt --data m.npy --json v.pt", "it is v.pt"),
        ("audit w.pt --data m.npy --test t.npy --html t.npy", "it is t.npy"),
        ("audit w.pt --data m.npy --labels y.npy --json y.npy", "it is y.npy"),
        ("audit w.pt --latents m.npy --json m.npy", "it is m.npy"),
        ("audit w.pt --data m.npy --module code/net.py:make --json code/net.py", "it is code/net.py"),
        ("audit w.pt --data m.npy --module code/net.py:make(a='x:y') --json code/net.py", "it is code/net.py"),
        ("audit w.pt --data m.npy --module code.net:make --json code/net.py", "it is code/net.py"),
        ("audit --from-samples ~nobody-here/x --data m.npy", "home folder in ~nobody-here/x is not known"),
        ("audit w.pt --data m.npy --features code/net.py:make --json code/net.py", "it is code/net.py"),
        ("audit images --data m.npy --json images/unet/config.json", "it lies in images"),
        ("study export images --out images", "is a folder"),
        ("study export images --out images/unet/config.json", "it lies in images"),
        ("study plot images --out images/1.png", "it lies in images"),
        ("reproduce --out m.npy", "is a file, not a folder"),
        ("reproduce --out images", "files that vkernel reproduce did not write"),
        ("reproduce --out /", "files that vkernel reproduce did not write"),
        ("reproduce --out /vkernel-test-nowhere", "none is made in /"),
    ],
)
def test_an_output_never_takes_the_place_of_an_input(here: Path, refused: Refused, options: str, why: str) -> None:
    """The inputs are not even read: here most are no weights and no images."""
    for name in ("w.pt", "v.pt", "t.npy", "y.npy", "kept", "code/net.py", "images/1.png", "images/unet/config.json"):
        Path(name).parent.mkdir(exist_ok=True, parents=True)
        Path(name).write_text(f"this is {name}")
    Path("kept").chmod(0o444)
    Path("link.html").symlink_to("m.npy")
    before = {p: p.read_bytes() for p in here.rglob("*") if p.is_file()}
    assert why in refused(*options.split())
    assert {p: p.read_bytes() for p in here.rglob("*") if p.is_file()} == before


def test_a_store_in_the_place_of_its_study(refused: Refused) -> None:
    Path("study.toml").write_text("title = 'x'\nquestion = '?'\nmembers = 2\nblock = 2\ndata.name = 'pair'\n")
    before = Path("study.toml").read_bytes()
    refused("study", "run", "study.toml", "--store", "study.toml", "--quiet")
    assert Path("study.toml").read_bytes() == before


# --- files before the screen ----------------------------------------------------------------------------------------


def test_results_are_on_disk_whatever_happens_then(vkernel: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    left = vkernel(*PROFILE, "--json", "/dev/full", "--html", "~/p.html")
    assert left.code == 2
    assert left.err == "vkernel: Cannot write /dev/full: No space left on device.\n"
    assert "12 points in 2 dimensions" in left.out
    assert Path("~/p.html").expanduser().is_file()

    def broken(table: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(common, "show", broken)
    left = vkernel(*PROFILE, "--json", "p.json")
    assert (left.code, left.err) == (2, "vkernel: Input/output error.\n")
    assert json.loads(Path("p.json").read_text())["n"] == 12


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home for ``~``."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


# --- the screen -----------------------------------------------------------------------------------------------------


def printed(monkeypatch: pytest.MonkeyPatch, encoding: str, act: Callable[[], None]) -> str:
    """Return what a stream of this encoding receives."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    streams.prepare()
    act()
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("columns", ["0", "1", "20", "-7", "many", "²", "9" * 30])
def test_no_width_of_the_terminal_cuts_a_number(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "dumb")
    table = Table(*(f"quantity{k}" for k in range(12)))
    table.add_row(*(f"{k}.123456789" for k in range(12)))
    text = printed(monkeypatch, "utf8", lambda: common.show(Group(Text("σ"), table)))
    assert all(f"{k}.123456789" in text for k in range(12))
    assert "…" not in text


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf8"])
def test_encodings_without_greek_letters(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    bad = os.fsdecode(b"caf\xe9")
    text = printed(monkeypatch, encoding, lambda: streams.say(f"σ Σ 0.1 ± 0.02 – x² → {bad} 猫"))
    assert "\\xe9" in text
    if encoding == "ascii":
        assert text == "sigma Sigma 0.1 +- 0.02 - x2 -> caf\\xe9 ?\n"


def test_texts_of_users_are_no_markup_and_no_escapes(
    vkernel: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = "[red]x[/red] [/nope] [link=http://a]b :smile: \x1b[31m\x1b]0;title\x07"
    table = Table(words, title=words, caption=words)
    table.add_row(words)
    text = printed(monkeypatch, "utf8", lambda: common.show(Group(words, table)))
    assert "\x1b" not in text
    assert "\x07" not in text
    for part in ("[red]x[/red]", "[/nope]", ":smile:", "\\x1b[31m"):
        assert text.replace("\n", " ").count(part) >= 4
    monkeypatch.undo()
    for name in ("[red]x.npy", "\x1b[31mred.npy", os.fsdecode(b"caf\xe9.npy")):
        np.save(tmp_path / name, np.eye(4))
        made = {f"--{kind}": f"{tmp_path / name}.{kind}" for kind in ("json", "html")[: 1 + (name[0] == "c")]}
        left = vkernel(
            "profile", tmp_path / name, "--queries", 4, "-q", *(part for pair in made.items() for part in pair)
        )
        assert left.code == 0, left.err
        assert "\x1b" not in left.out
        assert all(Path(path).is_file() for path in made.values())
        assert "\x1b" not in vkernel("profile", f"{tmp_path / name}.missing").err


# --- errors of the machine ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "Not enough memory;"),
        (np._core._exceptions._ArrayMemoryError((10**12,), np.dtype("f8")), "memory to allocate 7.28 TiB;"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 80 bytes."),
            "80 bytes",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), "memory to allocate 20.00 GiB;"),
        (RuntimeError("Storage size calculation overflowed with sizes=[9999999999, 9999999999]"), "Not enough memory;"),
        (UnicodeEncodeError("utf-8", "caf\udce9", 3, 4, "surrogates not allowed"), "name caf\\xe9 cannot be used"),
        (PermissionError(13, "Permission denied", "\x1bx"), "Permission denied: \\x1bx."),
    ],
)
def test_errors_of_the_machine_are_sentences(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def failing(**_: object) -> None:
        raise error

    monkeypatch.setattr(commands, "app", failing)
    assert words in refused()


def test_a_warning_is_one_line(vkernel: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "app", lambda **_: warnings.warn("one\n\x1btwo", stacklevel=1))
    assert vkernel() == Left(0, "", "vkernel: one \\x1btwo\n")


def test_a_bug_is_no_sentence_but_what_an_interrupt_causes_is(vkernel: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(**_: object) -> None:
        raise RuntimeError("a bug")

    def half_imported(**_: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except KeyboardInterrupt:
            raise AttributeError("module 'numpy' has no attribute 'subtract'") from None

    monkeypatch.setattr(commands, "app", bug)
    with pytest.raises(RuntimeError, match="a bug"):
        commands.run()
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(commands, "app", half_imported)
    assert vkernel() == Left(130, "", "vkernel: stopped.\n")
    assert signal.getsignal(signal.SIGINT) is before


# --- processes ------------------------------------------------------------------------------------------------------


def started(line: str, **environment: str) -> subprocess.Popen[str]:
    """Begin a command in a shell, where ``V`` is vkernel."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    held = os.environ | {"V": f"{sys.executable} -m vkernel", "PYTHONUNBUFFERED": ""} | environment
    return subprocess.Popen(line, shell=True, executable="/bin/bash", text=True, env=held, **pipes)


def test_streams_that_are_closed_full_or_not_read() -> None:
    line = f"$V {' '.join(map(str, PROFILE))} --json a.json <&- >&- 2>&-; echo $?; $V --version >/dev/full; echo $?"
    line += "; $V --help | head -n 1 >/dev/null"
    locale = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "COLUMNS": "0", "PYTHONWARNINGS": "ignore"}
    out, err = started(line, **locale).communicate(timeout=120)
    assert out.split() == ["0", "2"], (out, err)
    assert json.loads(Path("a.json").read_text())["n"] == 12
    assert err == "vkernel: No space left on device.\n"


def test_settings_of_matplotlib_and_ctrl_c() -> None:
    Path("matplotlibrc").write_bytes(bytes(range(128, 256)))
    process = started(f"exec $V {' '.join(map(str, PROFILE))} --html a.html")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    assert err.splitlines()[-1].startswith("vkernel: matplotlib, which draws the figures, cannot read its settings")
    assert "Traceback" not in err
    assert not Path("a.html").exists()
    process = started("exec $V profile m.npy --queries 1000000 -q")
    time.sleep(1.0)  # while torch is imported, or the points are evaluated
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "vkernel: stopped.\n")
