"""Names, constructors and parsing of processes."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from processes import each

from vkernel.core.errors import InputError
from vkernel.process import DDPM, EDM, PROCESSES, VE, VP, Cosine, FlowMatching, Toy, VPSong, parse


def test_repr_prints_the_formula():
    assert repr(VP()) == "VP: alpha = exp(-(0.1 t + 9.95 t²)), S = 1 - alpha², eps=0.001, T=1"
    assert "1000 betas 0.0001 … 0.02" in repr(DDPM.linear())
    assert VP.beta.__qualname__ == "VP.beta"


@each
def test_processes_are_values(process):
    twin = pickle.loads(pickle.dumps(process))
    assert twin == process
    assert hash(twin) == hash(process)
    assert process.base is process
    assert process.whiten(x := torch.ones(2)) is x
    with pytest.raises(AttributeError):
        process.T = 3.0


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: VP(eps=-1e-3), "eps must be positive"),
        (lambda: VP(eps=1.0), "eps must be less than T"),
        (lambda: VP(eps=2.0, T=1.0), "eps must be less than T; got eps=2 and T=1"),
        (lambda: VP(T=math.inf), "T must be finite"),
        (lambda: VP(T=math.nan), "T must be finite"),
        (lambda: VP(T="late"), "T must be numeric"),
        (lambda: VP(beta_min=0.0), "beta_min must be positive"),
        (lambda: VP(beta_min=3.0, beta_max=2.0), "beta_min must not exceed beta_max"),
        (lambda: VPSong(beta_min=-1.0), "beta_min must be positive"),
        (lambda: VP(T=100.0), "sigma/alpha must grow from eps to T"),
        (lambda: VE(sigma_min=0.0), "sigma_min must be positive"),
        (lambda: VE(sigma_min=2.0, sigma_max=2.0), "sigma/alpha must grow"),
        (lambda: EDM(T=0.0), "T must be positive"),
        (lambda: Cosine(s=0.0), "s must be positive"),
        (lambda: Cosine(T=1.0), "T must be less than 1"),
        (lambda: FlowMatching(T=1.0), "T must be less than 1, where beta and D diverge"),
        (lambda: Toy(T=1.5), "T must be less than 1"),
        (lambda: DDPM([0.1]), "at least two betas"),
        (lambda: DDPM([0.1, 1.0]), "strictly between 0 and 1"),
        (lambda: DDPM([0.1, 0.0]), "strictly between 0 and 1"),
        (lambda: DDPM([0.1, math.nan]), "finite"),
        (lambda: DDPM([0.1, "b"]), "betas must be numeric"),
        (lambda: DDPM(torch.full((2, 2), 0.1)), "betas must be numeric"),
        (lambda: DDPM(0.1), "betas must be numeric"),
        (lambda: DDPM([0.1, 0.2, 0.3], T=3.0), "at most 2"),
        (lambda: DDPM.linear(steps=1), "2 or more"),
        (lambda: DDPM.scaled_linear(beta_start=-0.1), "positive"),
        (lambda: DDPM.from_alphas_cumprod([0.9, 0.5, 0.0]), "alphas_cumprod must be positive"),
        (lambda: DDPM.from_alphas_cumprod([0.9, 0.95]), "strictly between"),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(make, sentence):
    with pytest.raises(InputError, match=sentence) as caught:
        make()
    assert str(caught.value).endswith(".")


def test_parse():
    assert [type(parse(name)) for name in PROCESSES] == list(PROCESSES.values())
    assert parse("vp") == VP()
    assert parse(" VP : beta_max = 10, eps=1e-4 ") == VP(beta_max=10.0, eps=1e-4)
    assert parse("flow:T=0.9") == FlowMatching(T=0.9)
    assert parse("ddpm") == DDPM.linear()
    assert parse("ddpm:steps=100,beta_end=.1,T=50") == DDPM.linear(1e-4, 0.1, 100, T=50.0)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no process ''; give one of vp, vpsong, ddpm, cosine, ve, edm, flow, toy"),
        ("vpp", "no process 'vpp'"),
        ("vp:sigma=1", "vp takes beta_min, beta_max, eps, T, each once; 'sigma=1' is none of these"),
        ("vp:eps=1e-3,eps=1e-4", "each once"),
        ("vp:eps", "'eps' does not give eps a number; write for example vp:eps="),
        ("vp:eps=small", "'eps=small' does not give eps a number"),
        ("ddpm:steps=10.5", "does not give steps a number"),
        ("ddpm:betas=1", "ddpm takes beta_start"),
        ("toy:T=1", "T must be less than 1"),
    ],
)
def test_parse_refuses(text, sentence):
    with pytest.raises(InputError, match=sentence):
        parse(text)
