"""Writing of files: a result is on disk completely or not at all, and nothing but the named file is changed.

What is written to depends on what stands at the path, after ``~`` and symbolic links are followed:

- nothing, or a regular file: the content goes to a new file of an unpredictable name in the same folder, which then
  takes the place of the old one in one step. Mode and owner of the old file are kept, a new one follows the umask.
  Other hard links to the old file keep the old content.
- a pipe, a terminal or another character device: the content is written to it. If standard output or error already
  goes there, it is written to that stream, after what was printed.
- a file without write permission is refused, also for root, whom the system would let write: its mode states a wish.
  So are folders, sockets and block devices.

Missing folders are made below an existing one, but not in ``/``.
"""

import contextlib
import errno
import json
import os
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from vkernel.core.errors import InputError, require, shown
from vkernel.version import __version__

PAGES = (".html", ".htm")  # nothing reads these as data or weights
OWN = b'{\n "vkernel": '  # the beginning of results that write_json wrote


def expand(path: str | os.PathLike[str]) -> Path:
    """Return a path whose ``~`` is replaced, if it can be the name of a file."""
    require(isinstance(path, str | os.PathLike), f"A file is named by text or a path, not by a {type(path).__name__}.")
    require("\0" not in str(path), f"{shown(path)} is no name of a file: it contains a zero byte.")
    try:
        found = Path(path).expanduser()
        found.exists()  # raises for a name that is too long
    except RuntimeError:
        raise InputError(f"The home folder in {shown(path)} is not known; give the whole path.") from None
    except OSError as error:
        raise InputError(f"{shown(path):.100} cannot be used as a name: {error.strerror}.") from None
    return found


def write(path: str | Path, content: str | bytes) -> Path:
    """Write a file as the module describes, and return its path. Text is stored as UTF-8."""
    path, raw = expand(path), content.encode(errors="backslashreplace") if isinstance(content, str) else content
    with _readable_errors(path):
        real, old = _place(path)
        stream = None if old is None else stream_to(old)
        if stream is not None:
            for printed in filter(None, (sys.stdout, sys.stderr)):
                printed.flush()
            with os.fdopen(os.dup(stream), "wb") as file:
                file.write(raw)
        elif _in_place(real, old):
            with path.open("wb") as file:
                file.write(raw)
        else:
            real.parent.mkdir(parents=True, exist_ok=True)
            _replace(real, old, raw)
    return path


def write_json(path: str | Path, values: Mapping[str, object]) -> Path:
    """Write results as JSON, after the version of the package."""
    return write(path, json.dumps({"vkernel": __version__, **values}, indent=1, allow_nan=False) + "\n")


def make_folder(path: str | Path) -> Path:
    """Make a folder, and missing ones above it, below an existing folder other than ``/``."""
    path = expand(path)
    with _readable_errors(path):
        _check_parents(path.resolve(), path)
        path.resolve().mkdir(parents=True, exist_ok=True)
    return path


def check_outputs(outputs: Mapping[str, str | Path | None], inputs: Iterable[str | Path | None]) -> None:
    """Refuse files to write, given by their options, before any work: those that cannot be written, and those that are
    an input, lie in a folder that is read, or are named twice. Inputs that do not exist are left out."""
    sources, found = [path for path in map(_existing, inputs) if path is not None], dict[Path, str]()
    for option, given in outputs.items():
        if given is None:
            continue
        path, named = expand(given), f"{option} {shown(given)}"
        with _readable_errors(path):
            real, old = _place(path)
            if _in_place(real, old):
                if old is not None and stat.S_ISCHR(old.st_mode):
                    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY))
                continue  # several results can follow each other in a pipe
            for other, first in found.items():
                one = other == real or (old is not None and other.exists() and other.samefile(real))
                require(not one, f"{first} and {named} are one file; give two names.")
                inside = other in real.parents or real in other.parents
                require(not inside, f"Of {first} and {named} one would be a folder and a file.")
            found[real] = named
            for source in sources if old is not None else ():
                why = f"is {shown(source)}" if source.is_file() else f"lies in {shown(source)}"
                good = not _reads(source, real)
                require(good, f"{named} would overwrite what is read: it {why}. Give another file.")
            _check_folder(real, old)


def _existing(path: str | Path | None) -> Path | None:
    try:
        found = None if path is None else expand(path)
        return found if found is not None and found.exists() else None
    except (OSError, InputError):  # too long a name, for example
        return None


def _reads(source: Path, output: Path) -> bool:
    """Return whether the output is the source, under whatever name, or a file in it if that is a folder."""
    if not source.is_dir():
        return source.samefile(output)
    with output.open("rb") as file:
        own = file.read(len(OWN)) == OWN
    about, seen = output.stat(), set[Path]()
    for folder, folders, files in () if own or output.suffix.lower() in PAGES else os.walk(source, followlinks=True):
        real = Path(folder).resolve()
        if real in seen:  # a link that leads back
            folders.clear()
            continue
        seen.add(real)
        for name in files:
            with contextlib.suppress(OSError):  # a dangling link is no input
                if os.path.samestat(Path(folder, name).stat(), about):
                    return True
    return False


def _place(path: Path) -> tuple[Path, os.stat_result | None]:
    """Return where a path leads and what is there, if it can be written to."""
    try:
        old = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        real = path.resolve()
        made = not path.is_symlink() or real.parent.is_dir()
        require(made, f"{shown(path)} is a link to {shown(real)}, whose folder does not exist.")
        _check_parents(real.parent, path)
        return real, None
    kind = stat.S_IFMT(old.st_mode)
    require(kind != stat.S_IFDIR, f"{shown(path)} is a folder; give the name of a file to write.")
    good = kind in (stat.S_IFREG, stat.S_IFIFO, stat.S_IFCHR)
    require(good, f"{shown(path)} is a socket or a disk, no file; give another name.")
    require(_writable(path), f"{shown(path)} is read-only and stays as it is; give another file, or change its mode.")
    return path.resolve() if kind == stat.S_IFREG else path, old


def _in_place(real: Path, old: os.stat_result | None) -> bool:
    """Return whether a path is written to as it is: a pipe, a device, or a file that is open but has no name any more,
    as ``/dev/stdout`` may be."""
    return old is not None and not (stat.S_ISREG(old.st_mode) and real.exists())


def _writable(path: Path) -> bool:
    return bool(path.stat().st_mode & 0o222) and os.access(path, os.W_OK)


def _check_parents(folder: Path, path: Path) -> None:
    """Refuse a folder that can only be made in ``/``, or where a file is in the way."""
    above = next(p for p in (folder, *folder.parents) if p.exists())
    require(above.is_dir(), f"{shown(path)} cannot be made: {shown(above)} is a file, not a folder.")
    made = folder == above or above != Path(above.anchor)
    require(made, f"There is no folder {shown(folder)}, and none is made in {above}; make it first, or give another.")
    longest = os.pathconf(above, "PC_NAME_MAX")
    good = all(len(os.fsencode(part)) <= longest for part in path.parts)
    require(good, f"A name in {shown(path)[:60]}… is longer than the {longest} bytes that the disk allows.")


def _check_folder(real: Path, old: os.stat_result | None) -> None:
    """Refuse a file in whose folder none can be made; an old one is then written in place."""
    folder = next(p for p in real.parents if p.exists())
    if _writable(folder):
        with _beside(folder / real.name) as aside:
            aside.touch(exist_ok=False)  # some disks refuse it whatever the mode says
    else:
        require(old is not None, f"The folder {shown(folder)} is read-only; give another for {shown(real.name)}.")


def stream_to(old: os.stat_result) -> int | None:
    """Return the number of the standard stream, output or error, that goes to a file of this status."""
    for number in (1, 2):
        with contextlib.suppress(OSError):  # a closed stream
            if os.path.samestat(os.fstat(number), old):
                return number
    return None


def _replace(real: Path, old: os.stat_result | None, raw: bytes) -> None:
    try:
        with _beside(real) as aside:
            with aside.open("xb") as file:  # the system applies the umask
                file.write(raw)
            if old is not None:
                with contextlib.suppress(PermissionError):  # only root can give a file to another user
                    os.chown(aside, old.st_uid, old.st_gid)
                aside.chmod(stat.S_IMODE(old.st_mode))
            aside.replace(real)
    except OSError as error:
        if old is None or error.errno not in (errno.EACCES, errno.EPERM, errno.EBUSY):
            raise
        real.write_bytes(raw)  # a file that may be written in a folder that may not, or one that is a mount


@contextlib.contextmanager
def _beside(real: Path) -> Iterator[Path]:
    """Yield a name in the same folder that nobody can foresee; a file of that name is removed."""
    aside = real.with_name(f".vkernel-{secrets.token_hex(8)}")
    try:
        yield aside
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def _readable_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead in a circle
        why = error.strerror if isinstance(error, OSError) else None
        raise InputError(f"Cannot write {shown(path)}: {why or shown(error)}.") from None
