"""Errors are sentences: what was wrong, what was given, what would be accepted.

Every check of an argument or a file raises :class:`InputError`; the command line turns it into one line on standard
error and exit code 2. Any other exception is a bug of the package."""


class InputError(ValueError):
    """The input cannot be used as it is; the message says why and what would be accepted."""


def require(condition: object, sentence: str) -> None:
    """Raise :class:`InputError` with ``sentence`` unless ``condition`` holds."""
    if not condition:
        raise InputError(sentence)
