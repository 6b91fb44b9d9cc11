"""``python -m vkernel.cli``."""

from vkernel.cli import main

main()
