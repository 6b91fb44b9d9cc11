"""``python -m vkernel`` is ``vkernel``."""

from vkernel.cli import main

if __name__ == "__main__":
    main()
