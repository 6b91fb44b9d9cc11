"""``python -m vkernel.cli``."""

from vkernel.cli import main

if __name__ == "__main__":
    main()
