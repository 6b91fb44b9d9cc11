"""Errors are sentences: what was wrong, what was given, what would be accepted.

Every check of an argument or a file raises :class:`InputError`; the command line turns it into one line on standard
error and exit code 2. Any other exception is a bug of the package."""

import importlib.util
import unicodedata


class InputError(ValueError):
    """The input cannot be used as it is; the message says why and what would be accepted, in one line without the
    control characters that names of files and arrays may hold.

    >>> import vkernel as vk
    >>> try:
    ...     vk.VP(eps=2.0)
    ... except vk.InputError as error:
    ...     print(error)
    eps must be less than T; got eps=2 and T=1.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(shown(" ".join(line.strip() for line in sentence.splitlines())))


def require(condition: object, sentence: str) -> None:
    """Raise :class:`InputError` with ``sentence`` unless ``condition`` holds."""
    if not condition:
        raise InputError(sentence)


def needs(what: str, extra: str, *modules: str) -> None:
    """Refuse ``what`` where one of ``modules`` is not installed, and name the extra of the package that installs it."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    verb = "needs" if not what.endswith(",") else "need"
    require(not missing, f"{what} {verb} {', '.join(missing)}: pip install 'vkernel[{extra}]'.")


def shown(text: object) -> str:
    r"""Return a text for people: control characters and bytes that are no UTF-8 as escapes, ``\x1b`` or ``\xe9``."""
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else _escape(c) for c in str(text))


def _escape(character: str) -> str:
    code = ord(character)
    byte = code - 0xDC00 if 0xDC80 <= code <= 0xDCFF else code  # Python's sign for a byte that is no UTF-8
    return f"\\x{byte:02x}" if byte < 0x100 else f"\\u{byte:04x}" if byte < 0x10000 else f"\\U{byte:08x}"
