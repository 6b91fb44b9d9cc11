"""The scorecard: verdicts follow from rules and numbers, every claim is listed once, and processes change no number."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from exhibits import Made, without_pictures

from vkernel import reproduce
from vkernel.core.estimate import Estimate
from vkernel.reproduce import exhibit, scorecard
from vkernel.reproduce.exhibit import Page, Part, Run, Skip

RULE = {"key": "a", "section": "§1", "claim": "A.", "computed": "One ratio.", "number": "{{ ratio|estimate }}"}
RULE |= {"rule": "Holds above 1.", "holds": "ratio.low > 1", "fails": "ratio.high < 1", "part": "ratio.value > 1"}


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (Estimate(2.0, 0.1, 1.8, 2.2), "holds"),
        (Estimate(0.5, 0.1, 0.3, 0.7), "does not hold"),
        (Estimate(1.1, 0.1, 0.9, 1.3), "holds in part"),
        (Estimate(0.9, 0.1, 0.7, 1.1), "undecided"),
    ],
)
def test_the_verdict_is_the_first_rule_that_is_met(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ratio: Estimate, verdict: str
) -> None:
    monkeypatch.setattr(exhibit, "read", lambda name: {"sizes": "One number."})
    claim = Page(Run(tmp_path, 0, True, lambda share: None), "x", {}, ratio=ratio).claim(RULE)
    assert claim.verdict == verdict
    assert claim.number == exhibit.estimate(ratio)
    assert claim.tests == {key: RULE[key] for key in ("holds", "fails", "part")}


def texts() -> dict[str, dict[str, str]]:
    names = [part.text or part.name for part in reproduce.exhibits()]
    return {claim["key"]: claim for name in names for claim in exhibit.read(name).get("claims", ())}


def test_every_claim_is_on_the_scorecard_once() -> None:
    order, given = exhibit.read("page")["scorecard"], texts()
    assert sorted(order) == sorted(given)
    assert len(set(order)) == len(order)
    for claim in given.values():
        assert claim["rule"].endswith((".", "}}"))
        assert claim["claim"].endswith(".")
        assert "holds" in claim


def test_a_run_ends_with_the_scorecard(made: Made) -> None:
    found = json.loads((made.out / "scorecard.json").read_text())
    assert [claim["key"] for claim in found["claims"]] == exhibit.read("page")["scorecard"]
    page, markdown = ((made.out / f"scorecard.{kind}").read_text() for kind in ("html", "md"))
    for claim in found["claims"]:
        assert f'id="{claim["key"]}"' in page
        assert f"## {claim['claim']}\n" in markdown
        computed = claim["exhibit"] in made.exhibits
        assert (claim["verdict"] == scorecard.NOT_COMPUTED) == (not computed)
        assert bool(claim["number"]) == computed
        assert claim["rule"].endswith(".") or not computed
    assert 'href="scorecard.html"' in (made.out / "index.html").read_text()


def skip(run: Run) -> exhibit.Exhibit:
    raise Skip("There is no data.")


def test_processes_change_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {part.name: part for part in reproduce.exhibits()}
    few = [parts["figure1"], parts["shares"], Part("Skipped", 1.0, skip, after="figure1")]
    monkeypatch.setattr(reproduce, "exhibits", lambda: few)
    without_pictures(monkeypatch)
    shown: list[float] = []
    with exhibit.one_thread():
        reproduce.run(tmp_path / "one", quick=True)
    reproduce.run(tmp_path / "two", quick=True, workers=2, progress=lambda _, share: shown.append(share))
    for name in ("figure1.npz", "shares.npz"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert shown == sorted(shown)
    assert shown[-1] == pytest.approx(1)
    assert "Skipped was not made. There is no data." in capsys.readouterr().err


def test_the_documented_scorecard_is_that_of_these_rules() -> None:
    docs = Path(__file__).parents[2] / "docs"
    found = json.loads((docs / "scorecard.json").read_text())
    assert [claim["key"] for claim in found["claims"]] == exhibit.read("page")["scorecard"]
    for claim, given in ((claim, texts()[claim["key"]]) for claim in found["claims"]):
        assert claim["tests"] == {key: given[key] for key in exhibit.VERDICTS if key in given}, claim["key"]
        assert claim["verdict"] in {*exhibit.VERDICTS.values(), exhibit.UNDECIDED}
        assert claim["number"]


def test_readme_shows_the_documented_scorecard() -> None:
    root = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location("scorecard_docs", root / "docs" / "scorecard.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    shown = script.BLOCK.search((root / "README.md").read_text())
    assert shown is not None
    assert shown[0] == script.table(json.loads((root / "docs" / "scorecard.json").read_text()))
