"""Argument checks and progress."""

from __future__ import annotations

import inspect

import pytest
import torch

import vkernel as vk
from vkernel.core import checks
from vkernel.core.errors import InputError
from vkernel.core.progress import progress


def test_checks_return_what_they_accept():
    assert checks.check_whole(3, "n") == 3
    assert checks.check_whole(0, "n", 0) == 0
    assert checks.check_number(-1, "x") == -1.0
    assert checks.check_positive(2, "x") == 2.0
    assert checks.check_share(0.5, "p") == 0.5
    assert checks.check_choice("a", "kind", ("a", "b")) == "a"
    assert checks.check_type(1, "n", int) == 1
    x = torch.zeros(4, 2)
    assert checks.check_shape(x, "x", (2,)) is x
    assert checks.check_shape(x, "x", ()) is x


@pytest.mark.parametrize(
    ("check", "sentence"),
    [
        (lambda: checks.check_whole(True, "n"), "n must be a whole number, 1 or more, not True"),
        (lambda: checks.check_whole(1, "n", 2), "2 or more"),
        (lambda: checks.check_number(float("nan"), "x"), "x must be a finite number, not nan"),
        (lambda: checks.check_number(0.5, "p", 1), "x?p must be a finite number, 1 or more"),
        (lambda: checks.check_positive(0, "x"), "x must be positive and finite, not 0"),
        (lambda: checks.check_share(1, "p"), "p must be a number between 0 and 1"),
        (lambda: checks.check_choice("c", "kind", ("a", "b")), "kind must be one of a, b, not 'c'"),
        (lambda: checks.check_type("1", "n", int), "n must be a int, not str"),
        (lambda: checks.check_shape(torch.zeros(3), "x", (2,)), r"x has shape \(3,\); it must end in .* \(2,\)"),
    ],
)
def test_checks_refuse_with_a_sentence(check, sentence):
    with pytest.raises(InputError, match=sentence):
        check()


def test_progress_reports_shares_to_a_callback():
    seen: list[tuple[str, float]] = []
    with progress(4.0, lambda label, share: seen.append((label, share))) as step:
        step("a")
        step("b", 3.0)
        step("c")
    assert seen == [("a", 0.25), ("b", 1.0), ("c", 1.0)]


def test_progress_writes_lines_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr("vkernel.core.progress.EVERY", 0.0)
    with progress(2.0, True) as step:
        step("half")
    assert "half: 50 %" in capsys.readouterr().err
    with progress(2.0, False) as step:
        step("half")
    assert capsys.readouterr().err == ""


SAMPLING = {"steps": 100, "spacing": "log", "save": (), "callback": None}
SAMPLING |= {"generator": None, "progress": False, "allow_nan": False}
SAMPLERS = [vk.sample.pf_ode, vk.sample.reverse_sde, vk.sample.ancestral, vk.sample.naive]
SAMPLERS += [vk.sample.effective_sde, vk.sample.semiclassical]
READING = {"members": None, "skip_diverged": False}
METRICS = [vk.metrics.histogram, vk.metrics.gap_mass, vk.metrics.boundary_mass]
METRICS += [vk.metrics.memorised_fraction, vk.metrics.energy_distance, vk.metrics.frechet_distance]


@pytest.mark.parametrize(
    ("function", "contract"),
    [(f, SAMPLING) for f in SAMPLERS] + [(f, READING) for f in METRICS],
    ids=lambda a: getattr(a, "__name__", "options"),
)
def test_functions_show_the_options_that_they_pass_on(function, contract):
    shown = inspect.signature(function).parameters
    assert {name: shown[name].default for name in contract} == contract
    assert all(p.kind is not p.VAR_KEYWORD for p in shown.values())


def test_an_unknown_option_is_refused():
    score = vk.EmpiricalScore(vk.Empirical(torch.zeros(2, 1)), vk.VP())
    with pytest.raises(TypeError, match="step"):
        vk.sample.pf_ode(score, torch.zeros(3, 1), step=5)
    with pytest.raises(TypeError, match="member"):
        vk.metrics.energy_distance(torch.zeros(3, 1), torch.zeros(3, 1), member=True)
