"""Run the tests with the lowest versions that pyproject.toml promises: ``make test-oldest``.

``python release/oldest.py FOLDER`` makes an environment in FOLDER. Of torch, whose old versions have no build for a CPU
on the package index, the version of constraints.txt is taken; what else is needed to run tests is that of
constraints.txt too."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("study", "netcdf", "adaptive", "explore", "monitor", "digits", "audit", "data", "loops")
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "psutil")


def lowest(requirements: list[str]) -> dict[str, str]:
    """Return the lowest version of each requirement ``name>=version``."""
    found = (re.fullmatch(r"([\w.-]+)>=([\w.]+)", requirement) for requirement in requirements)
    return {match[1]: match[2] for match in found if match is not None}


def main(folder: str) -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + [r for extra in EXTRAS for r in project["optional-dependencies"][extra]]
    versions = {name: version for name, version in lowest(asked).items() if name != "torch"}
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    tools = [line for line in pinned if line.partition("==")[0] in ("torch", *TOOLS)]
    path = Path(folder)
    venv.create(path, with_pip=True, clear=True)
    pip = [str(path / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *tools, *(f"{name}=={version}" for name, version in versions.items())], check=True, cwd=ROOT)
    subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
    pytest = [str(path / "bin" / "pytest"), "-n", "2", "-q"]
    tests = [], ["-m", "slow", "tests/adapters"]  # all fast ones, and those of other libraries' loops
    return max([subprocess.run([*pytest, *some], cwd=ROOT).returncode for some in tests])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
