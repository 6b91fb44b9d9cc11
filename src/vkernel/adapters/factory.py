"""The user's code that builds a network or a function: ``package.file:name`` or ``path/to/file.py:name``.

Code is imported as it would be in its own repository. During the import, and while a factory runs, ``sys.path`` begins
with the working folder and, for a file, with

* the root of its package: the first folder upwards without ``__init__.py``;
* its own folder, where scripts find their neighbours;
* the folders above up to the one that holds ``.git``, ``pyproject.toml``, ``setup.py`` or ``requirements.txt``.

A file in a package is imported under its full name (``models.unet``), so that ``from .blocks import Block`` works; so
is a file without ``__init__.py`` beside it, once its relative imports fail. Modules of an earlier factory are forgotten
before the next is imported: two repositories may both have a ``models.py``."""

import ast
import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from torch import nn

from vkernel.adapters.weights import reason
from vkernel.core.errors import InputError, require
from vkernel.core.files import expand

_ROOT = (".git", "pyproject.toml", "setup.py", "setup.cfg", "requirements.txt")  # of a repository
_OURS: dict[str, str] = {}  # modules that factories imported, and the folder of each


def build(factory: str | Callable[[], nn.Module]) -> nn.Module:
    """Build a module with a factory, a function or text; text may hold arguments: ``file.py:Net(channels=64)``."""
    with _importing(_file(factory) if isinstance(factory, str) else None):
        make = named(factory) if isinstance(factory, str) else factory
        require(callable(make), f"The factory must be a function that returns a network; got {type(make).__name__}.")
        _check_arguments(make, str(factory))
        try:
            module = make()
        except (Exception, SystemExit) as error:
            raise InputError(f"The factory {factory!r} failed: {type(error).__name__}: {reason(error)}.") from error
    if isinstance(module, nn.Module):
        for name, parameter in module.named_parameters():
            require(not parameter.is_meta, f"The factory {factory!r} left {name} on the device 'meta', without values.")
        return module
    raise InputError(f"The factory {factory!r} returned a {type(module).__name__}, not a Module.")


def named(text: str, what: str = "factory") -> Callable[..., object]:
    """Import ``package.file:factory`` or ``path/to/file.py:factory``; this runs the user's file."""
    found = re.fullmatch(r"(.+):([^\W\d][\w.]*)(\(.*\))?", text, re.DOTALL)
    if found is None:
        raise InputError(f"A {what} is named package.file:{what} or path/to/file.py:{what}, not {text!r}.")
    where, name, arguments = found.groups()
    path = _file(text)
    require(path is None or path.is_file(), f"There is no file {where}.")
    with _importing(path):
        try:
            made: object = importlib.import_module(where) if path is None else _import_file(path)
        except (Exception, SystemExit) as error:
            hint = f"a file outside the package path is named path/to/file.py:{what}"
            why = f"{type(error).__name__}: {reason(error)}"
            raise InputError(f"{where} cannot be imported ({why}); {hint}.") from error
    for part in name.split("."):
        require(part in dir(made), f"{where} has no {name!r}.")
        made = getattr(made, part)
    require(callable(made), f"{text!r} is a {type(made).__name__}, not a function or class.")
    return _bound(made, arguments, text) if arguments else made  # type: ignore[return-value]


def _bound(made: object, arguments: str, text: str) -> Callable[..., object]:
    """Return a call with the written arguments, which are literals; nothing in them is evaluated."""
    try:
        call = ast.parse(f"f{arguments}", mode="eval").body
        assert isinstance(call, ast.Call)
        assert all(k.arg for k in call.keywords)
        given = [ast.literal_eval(a) for a in call.args]
        by_name = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (ValueError, SyntaxError, AssertionError, TypeError, MemoryError, RecursionError):
        raise InputError(
            f"Arguments of a factory are plain values, as in file.py:Net(channels=64), not {text!r}."
        ) from None

    def make() -> object:
        return made(*given, **by_name)  # type: ignore[operator]

    return make


def _check_arguments(make: Callable[..., object], text: str) -> None:
    """Refuse a factory that needs arguments, and name these."""
    try:
        wanted = inspect.signature(make)
    except (ValueError, TypeError):  # built in
        return
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in wanted.parameters.values() if p.default is p.empty and p.kind not in kinds]
    write = (
        f"write them, {text.partition('(')[0]}({', '.join(f'{name}=…' for name in needed)}), or name a function without"
    )
    require(not needed, f"The factory {text!r} needs arguments: {', '.join(needed)}; {write}.")


def _file(text: str) -> Path | None:
    """Return the file that a factory's text names, by its path or as a module of the working folder."""
    if ".py:" in text:
        return expand(text.partition(".py:")[0] + ".py").absolute()
    path = expand(text.partition(":")[0].replace(".", "/") + ".py").absolute()
    return path if path.is_file() else None


@contextlib.contextmanager
def _importing(path: Path | None) -> Iterator[None]:
    """Search the folders of a file, and the working folder, for modules; forget those of an earlier factory."""
    folders = [str(f) for f in dict.fromkeys([*([] if path is None else _folders(path)), Path.cwd()])]
    for name in [name for name, folder in _OURS.items() if folder not in folders]:
        sys.modules.pop(name, None)
        del _OURS[name]
    before, known = list(sys.path), set(sys.modules)
    sys.path[:0] = folders
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before
        for name in set(sys.modules) - known:
            top = name.partition(".")[0]  # of a package that others had imported, nothing is forgotten
            where = next((f for f in folders if Path(f, f"{top}.py").is_file() or Path(f, top).is_dir()), None)
            if where is not None and top not in known:
                _OURS[name] = where


def _folders(path: Path) -> list[Path]:
    """Return the folders from which the code of a file imports, those that decide first."""
    root = _package_root(path)
    above = [root, *root.parents]
    marked = next((k for k, folder in enumerate(above) if any((folder / name).exists() for name in _ROOT)), 0)
    return [root, path.parent, *above[1 : marked + 1]]


def _package_root(path: Path) -> Path:
    return next(folder for folder in path.parents if not (folder / "__init__.py").is_file())


def _import_file(path: Path) -> ModuleType:
    """Import a file by its name in its package; one outside a package alone, or in its folder if it must be."""
    root = _package_root(path)
    if root != path.parent:
        return importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))
    try:
        return _run_file(path, path.stem)
    except ImportError as error:
        if "attempted relative import" not in str(error):
            raise
    for depth in (2, 3):  # folders without __init__.py are packages too
        sys.path.insert(0, str(path.parents[depth - 1]))
        try:
            return importlib.import_module(".".join(path.with_suffix("").parts[-depth:]))
        except ImportError as error:
            if "beyond top-level" not in str(error) or depth == 3:
                raise
    raise AssertionError


def _run_file(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name if name not in sys.modules else f"_vkernel_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module
