"""The command line: ``vkernel profile``, ``audit``, ``monitor``, ``study``, ``reproduce`` and ``explore``.

Input that cannot be used is refused with one sentence on standard error and exit code 2. This file imports little:
whatever takes time is imported by :func:`main`, so that Ctrl-C ends that too with one sentence.
"""

import signal
import sys
import threading
from types import FrameType
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line and leave with its exit code."""
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    try:
        if before is signal.default_int_handler:  # not where a shell made a job in the background deaf to it
            signal.signal(signal.SIGINT, stop)
        from vkernel.cli import streams

        streams.prepare()
        from vkernel.cli.commands import run

        if stopped.is_set():  # an import may have ignored it
            raise KeyboardInterrupt
        code = streams.finish(run())
    except (KeyboardInterrupt, Exception) as error:
        if not (stopped.is_set() or isinstance(error, KeyboardInterrupt)):  # an import that is stopped fails anyhow
            raise
        from vkernel.cli import streams

        code = streams.fail("stopped.", 130)
    finally:
        if signal.getsignal(signal.SIGINT) is stop:
            signal.signal(signal.SIGINT, before)
    if stopped.is_set():
        # Python notes an interrupt that passes through exec(), by which imports make classes, and would end as if
        # killed by it although it was caught; the next exec() of a string takes the note back
        exec("pass")
    sys.exit(code)
