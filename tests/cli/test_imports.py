"""What importing the package, an audit and a comparison bring: in one process of its own, stage by stage."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

STAGES = """
import json, sys

def held():
    return [m for m in sys.modules if "." not in m]

import vkernel.cli, vkernel.score.empirical, vkernel.data.loaders
found = {"import": held()}
import vkernel as vk
vk.audit
found["audit"] = held()
import torch
p = vk.VP(eps=0.01)
s = vk.Checkpoints([vk.as_score(lambda x, t, k=k: -k * x, p, (1,)) for k in (1.0, 1.1, 1.2, 1.3, 1.4)])
ds = vk.compare(s, vk.kernels.Measured(s), torch.ones(2, 1), 0.5, laws=False)
assert "members" in ds.attrs["table"]
found["compare"] = held()
print(json.dumps(found))
"""

pytestmark = pytest.mark.xdist_group("imports")  # one process for all


@pytest.fixture(scope="module")
def modules() -> dict[str, list[str]]:
    """Names of the modules that are imported after each stage; what one stage brings, the later ones have as well."""
    command = [sys.executable, "-W", "ignore", "-c", STAGES]
    found: dict[str, list[str]] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def test_import_is_light(modules: dict[str, list[str]]) -> None:
    """``import vkernel`` brings torch and numpy, none of the rest; the command line imports torch in ``main`` alone."""
    code = "import sys, vkernel.cli.commands; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    heavy = {"matplotlib", "xarray", "typer", "rich", "jinja2", "PIL", "pyarrow", "datasets", "sklearn", "diffusers"}
    assert not heavy & set(modules["import"])


def test_audit_is_imported_without_xarray_and_matplotlib(modules: dict[str, list[str]]) -> None:
    assert not {"xarray", "matplotlib"} & set(modules["audit"])


def test_the_table_of_a_comparison_needs_no_matplotlib(modules: dict[str, list[str]]) -> None:
    assert "xarray" in modules["compare"]
    assert "matplotlib" not in modules["compare"]
