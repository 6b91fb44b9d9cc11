"""The command line: ``vkernel profile``, ``audit``, ``study``, ``reproduce`` and ``explore``.

Input that cannot be used is refused with one sentence on standard error and exit code 2. This file imports little:
whatever takes time is imported by :func:`main`, so that Ctrl-C ends that too with one sentence.
"""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line and leave with its exit code."""
    try:
        from vkernel.cli import streams

        streams.prepare()
        from vkernel.cli.commands import run

        code = streams.finish(run())
    except KeyboardInterrupt:
        from vkernel.cli import streams

        code = streams.fail("stopped.", 130)
    sys.exit(code)
