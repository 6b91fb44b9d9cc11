"""The Python of README and documentation runs, links between pages lead to files, and examples run as scripts.

Tutorials run here in a small form, with numbers replaced in their text; ``make docs`` runs them as they are."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from scripts import script as load

import vkernel

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "howto").glob("*.md"))]
OPTIONAL = ("accelerate", "lightning", "transformers")
SMALL = {"train_with_monitor": "--n 32 --steps 40 --width 8 --every 10 --device cpu"}  # options of long examples
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TUTORIALS = {  # what is replaced in each tutorial to make it small
    "1_your_data": {"[:600]": "[:60]", "queries=256": "queries=16"},
    "2_your_network": {
        "steps = 5000": "steps = 2",
        "width = 256": "width = 8",
        '"digits", 1000, 512': '"digits", 50, 64',
        '"digits", 40, 512': '"digits", 20, 64',
        '["exact", "gaussian", "smoothed", "pca"]': '["exact", "gaussian"]',
        "quick=True, train=250": "levels=2, images=4, samples=2",
    },
    "3_your_training_run": {"steps = 8000": "steps = 20", "width = 128": "width = 8", "every = 100": "every = 10"},
    "4_theory_in_one_dimension": {
        "members = 100": "members = 10",
        "starts = 128": "starts = 8",
        "draws = 256": "draws = 16",
        '"gaussian", 16': '"gaussian", 4',
    },
}
ELSEWHERE = ("diffusers_accelerate", "lightning")  # run by tests/adapters, with the libraries of the extra loops
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if FENCE.search(p.read_text())], ids=lambda p: p.stem)
def test_python_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    lacking: set[str] = set()
    for code in FENCE.findall(page.read_text()):
        absent = {name for name in OPTIONAL if f"from {name}" in code or f"import {name}" in code}
        absent = {name for name in absent if importlib.util.find_spec(name) is None}
        lacking |= absent
        if not absent:
            exec(compile(code, str(page), "exec"), namespace)
    failed = [str(w.message) for w in recwarn if "training goes on" in str(w.message)]
    assert not failed  # a monitor never raises
    if lacking:
        pytest.skip(f"parts of the page need {', '.join(sorted(lacking))}, which the extra loops installs")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda p: p.stem)
def test_links_lead_to_files(page: Path) -> None:
    for link in re.findall(r"\]\(([\w./-]+\.\w+)(?:#[\w-]*)?\)", page.read_text()):
        assert (page.parent / link).exists(), f"{page.name} links to {link}, which does not exist"


@pytest.mark.parametrize("script", [p for p in EXAMPLES if p.stem not in ELSEWHERE], ids=lambda p: p.stem)
def test_example_runs(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), *SMALL.get(script.stem, "").split()])
    runpy.run_path(str(script), run_name="__main__")
    import matplotlib.pyplot as plt

    plt.close("all")


@pytest.mark.parametrize("script", sorted((ROOT / "tutorials").glob("*.py")), ids=lambda p: p.stem)
def test_tutorial_runs(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    monkeypatch.chdir(tmp_path)
    text = script.read_text()
    for given, small in TUTORIALS[script.stem].items():
        assert given in text, f"{script.name} no longer holds {given!r}"
        text = text.replace(given, small)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels and monitors: the sizes are too small
        exec(compile(text, str(script), "exec"), {"__name__": "__main__"})
    import matplotlib.pyplot as plt

    plt.close("all")
    assert "What to read next" in text


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_images_need_an_alternative_text(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("sphinx", reason="the checks of images come with the extra docs")
    from docutils import nodes, utils

    page = utils.new_document("page.md")
    page += nodes.image(uri="good.png", alt="Errors of three networks")
    page += nodes.image(uri="bad.png")
    with caplog.at_level("WARNING"):
        load("checks.py").check_images(None, page)
    assert [record.args[0] for record in caplog.records if record.args] == ["bad.png"]


def test_public_names_have_examples() -> None:
    assert load("checks.py").without_example() == []


@pytest.mark.parametrize("name", [m.name for m in pkgutil.walk_packages(vkernel.__path__, "vkernel.")])
def test_docstring_examples(name: str) -> None:
    if name.startswith("vkernel.posterior.gpu.triton_") or name == "vkernel.theories.streamed":
        pytest.importorskip("triton", reason="Triton comes with PyTorch for GPUs")
    module = importlib.import_module(name)
    failures, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for thing in vars(module).values():  # decorated functions, which testmod leaves out
        if hasattr(thing, "__wrapped__") and getattr(thing, "__module__", "") == name:
            for example in doctest.DocTestFinder(recurse=False).find(thing, globs=vars(module).copy()):
                failures += runner.run(example).failed
    assert failures == 0


def test_public_names_resolve() -> None:
    for name in vkernel.__all__:
        assert getattr(vkernel, name) is not None
    assert set(vkernel.__all__) <= set(dir(vkernel))
    with pytest.raises(AttributeError, match="nope"):
        _ = vkernel.nope


def test_every_equation_that_code_refers_to_is_in_the_theory() -> None:
    theory = (ROOT / "docs" / "theory.md").read_text()
    tags = set(re.findall(r"\\tag\{([\d.]+)\}", theory))
    for path in (ROOT / "src").rglob("*.py"):
        for number in re.findall(r"[( ]\((\d\.\d+)\)", path.read_text()):
            assert number in tags, f"{path.name} refers to equation ({number}), which docs/theory.md does not have"


@pytest.mark.slow
def test_documentation_builds(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    if not (ROOT / "docs" / "node_modules").exists():
        pytest.skip("the renderer of mathematics is not installed: make docs")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html"]
    built = subprocess.run([*command, str(ROOT / "docs"), str(tmp_path)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
