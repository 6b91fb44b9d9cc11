"""``python -m vkernel.cli`` is ``vkernel``."""

from vkernel.cli import main

main()
