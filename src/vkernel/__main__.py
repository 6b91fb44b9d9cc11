"""``python -m vkernel`` is ``vkernel``."""

from vkernel.cli import main

main()
