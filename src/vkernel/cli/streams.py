"""Standard output and error. Whatever they are (closed, a pipe that nobody reads, an encoding without Greek letters,
a terminal of no width), a command runs to its end, and its results are written."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
import unicodedata
from pathlib import Path

from vkernel.core.errors import shown

SPELLED = {"–": "-", "—": "-", "−": "-", "±": "+-", "×": "x", "·": "*", "…": "...", "≤": "<=", "≥": ">=", "→": "->"}
SPELLED |= {"≈": "~", "∞": "inf", "√": "sqrt", "’": "'", "‘": "'", "“": '"', "”": '"', "•": "*", "\u00a0": " "}


def prepare() -> None:
    """Make the streams accept every text."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # a stream that is closed: otherwise the next file that is opened would take its number, and its output
    os.close(number)
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf8")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf8")  # noqa: SIM115
    codecs.register_error("vkernel", _spell)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="vkernel")
    for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):  # rich and typer take them as they are
        size = os.environ.get(name, "80")
        if not (size.isascii() and size.isdigit() and 20 <= int(size) < 10_000):
            del os.environ[name]


def _spell(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that an encoding lacks: σ by sigma, ± by +-, others by ? or an escape."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_spelled, error.object[error.start : error.end])), error.end


def _spelled(character: str) -> str:
    kind, _, rest = unicodedata.name(character, "").partition(" ")
    if kind == "GREEK" and (words := rest.split())[1:2] == ["LETTER"]:
        return words[2].capitalize() if words[0] == "CAPITAL" else words[2].lower()
    plain = SPELLED.get(character) or unicodedata.normalize("NFKD", shown(character))
    return plain.encode("ascii", "ignore").decode() or "?"


def say(line: str) -> None:
    """Print a line; control characters, as of a file's name, are shown as escapes."""
    put(f"{shown(line)}\n")


def put(text: str) -> None:
    """Print a text as it is. If nobody reads the pipe any more, the rest of the output is dropped."""
    try:
        print(text, end="", flush=True)
    except OSError as error:
        _drop_output()
        if not isinstance(error, BrokenPipeError):
            raise


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python prints the rest when it ends


def warn(message: Warning | str, *where: object, **more: object) -> None:
    """Print a warning like a sentence of :func:`fail`, in the place of ``warnings.showwarning``."""
    fail(str(message))


def fail(sentence: str, code: int = 2) -> int:
    """Print a sentence to standard error, in one line without control characters, and return the exit code."""
    with contextlib.suppress(OSError):
        print(f"vkernel: {shown(' '.join(sentence.split()))}", file=sys.stderr, flush=True)
    return code


def finish(code: int) -> int:
    """Print what is still in the buffers, and return the exit code: 2 if that fails."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
    except OSError as error:
        _drop_output()
        return fail(f"Cannot print the results: {error.strerror}.")
    return code
