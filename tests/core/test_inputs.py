"""Inputs that are no real numbers, at every public entry: one sentence each."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import scipy.sparse
import torch

import vkernel as vk
from vkernel import InputError, metrics
from vkernel.train import features

warnings.filterwarnings("ignore", message=".*(nested tensors|sparse CSR|MaskedTensors|quantiz).*", category=UserWarning)


@pytest.fixture(scope="module")
def known():
    """A score, an ensemble, checkpoints and kernels in the plane."""
    torch.manual_seed(0)
    process, data = vk.VP(), vk.Empirical(torch.randn(20, 2))
    score = vk.EmpiricalScore(data, process)
    nets = vk.Checkpoints([vk.as_score(lambda x, t, k=k: -k * x, process, (2,)) for k in (1.0, 1.1, 1.2)])
    model = vk.models.Linear(features.random_fourier(6, 2, process))
    ensemble = vk.train_ensemble(model, data, process, members=5, draws=100)
    return process, data, score, nets, ensemble, vk.kernels.Naive(score, 1.0)


def tensors(n: int) -> dict[str, object]:
    x = torch.linspace(-1, 1, 2 * n).reshape(n, 2)
    with warnings.catch_warnings(action="ignore"):
        return {
            "complex": x.to(torch.complex64),
            "sparse": x.to_sparse(),
            "csr": x.to_sparse_csr(),
            "quantised": torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
            "meta": x.to("meta"),
            "nested": torch.nested.nested_tensor([torch.ones(2)] * n),
            "jagged": torch.nested.nested_tensor([torch.ones(2)] * n, layout=torch.jagged),
            "masked": torch.masked.masked_tensor(x, x > 0),
            "bits": torch.empty(n, 2, dtype=torch.bits8),
        }


def arrays(n: int) -> dict[str, object]:
    x = np.linspace(-1, 1, 2 * n).reshape(n, 2)
    return tensors(n) | {
        "complex array": x.astype(complex),
        "masked array": np.ma.masked_array(x, x > 0),
        "scipy": scipy.sparse.csr_matrix(x),
        "objects": np.array([object()] * n),
        "text": ["a"] * n,
        "dates": np.array(["2020-01-01"] * n, "datetime64[D]"),
        "records": np.zeros(n, [("a", "f4"), ("b", "f4")]),
        "ragged": [[1.0], [1.0, 2.0]],
        "truth": x > 0,
        "a number": 1.0,
        "nothing": None,
        "generator": (i for i in range(n)),
        "function": print,
    }


def test_training_sets_and_weights(known):
    process, *_ = known
    for name, bad in arrays(20).items():
        for make in (vk.Empirical, lambda p: vk.EmpiricalScore(p, process), vk.profile, metrics.distinct):
            with pytest.raises(InputError, match=r"\.$"):
                make(bad)
        if name != "nothing":  # equal weights
            with pytest.raises(InputError, match=r"\.$"):
                vk.Empirical(torch.zeros(20, 2), weights=bad)


def test_points(known):
    process, data, score, nets, ensemble, kernel = known
    x, sampler = torch.zeros(3, 2), vk.sample
    entries = [
        *((lambda v, s=s: s(v, 0.5)) for s in (score, nets[0], nets, ensemble, ensemble[0], vk.to_noise(score))),
        *((lambda v, s=s: s.mean(v, 0.5)) for s in (nets, ensemble)),
        *((lambda v, s=s: s.cov(v, 0.5).trace()) for s in (nets, ensemble, kernel, vk.kernels.Measured(nets))),
        *((lambda v, s=s: s.paired(v, 0.5)) for s in (nets, ensemble)),
        *((lambda v, s=s: s.sample(x_T=v, steps=2)) for s in (nets, ensemble)),
        *((lambda v, s=s: s(score, v, steps=2)) for s in (sampler.pf_ode, sampler.reverse_sde, sampler.ancestral)),
        *((lambda v, s=s: s(kernel, v, steps=2)) for s in (sampler.effective_sde, sampler.semiclassical)),
        lambda v: score.posterior(v, 0.5),
        lambda v: score.covariance(v, 0.5),
        lambda v: score.covariance(x, 0.5) @ v,
        lambda v: score.posterior(x, 0.5).cov @ v,
        lambda v: score.denoise(v, 0.5),
        lambda v: score.jvp(x, 0.5, v),
        lambda v: nets[0].output(v, 0.5),
        lambda v: process.perturb(v, 0.5),
        lambda v: vk.proxy_score(x, 0.5, v, process),
        lambda v: vk.as_score(lambda a, t: v, process, (2,))(x, 0.5),
        lambda v: vk.path.zero_action(score, v, 3),
        lambda v: metrics.copies(v, data),
        lambda v: metrics.nearest(v, data, 2),
        lambda v: metrics.extractor("standardised")(v),
        lambda v: nets.combine(v),
    ]
    for bad in (*tensors(3).values(), None, np.zeros((3, 2)), [[0.0, 0.0]]):
        for entry in entries:
            with pytest.raises(InputError, match=r"\.$"):
                entry(bad)


def test_times_and_samples(known):
    process, data, score, nets, ensemble, kernel = known
    x = torch.zeros(3, 2)
    at = [
        *((lambda t, s=s: s(x, t)) for s in (score, nets[0], nets, ensemble, vk.to_x0(score))),
        *((lambda t, s=s: s.cov(x, t).trace()) for s in (nets, ensemble, kernel)),
        process.check,
        lambda t: process.perturb(x, t),
        lambda t: vk.noise_fraction(data, process, t, queries=4),
        lambda t: vk.sample.pf_ode(score, x, steps=t),
        lambda t: vk.compare(nets, vk.kernels.Measured(nets), x, t, laws=False),
    ]
    bad_times = {k: v for k, v in arrays(3).items() if k != "a number"} | {"true": True, "large": 10**400, "j": 1j}
    of_two = [metrics.energy_distance, metrics.frechet_distance, metrics.total_variation, metrics.wasserstein]
    for bad in bad_times.values():
        for entry in at:
            with pytest.raises(InputError, match=r"\.$"):
                entry(bad)
        for distance in of_two:
            with pytest.raises(InputError, match=r"\.$"):
                distance(bad, torch.zeros(3, 2))


def test_seeds(known):
    process, _, score, nets, *_ = known
    x = torch.zeros(2, 2)
    for bad in (1 << 64, -(1 << 70), 1.5, True, "a", [1], np.float64(2), torch.tensor(3)):
        with pytest.raises(InputError, match="generator"):
            vk.sample.reverse_sde(score, x, steps=2, generator=bad)
    for bad in (1.5, True, "a", None, np.float64(2)):
        with pytest.raises(InputError, match="seed must be a whole number"):
            nets.sample(2, steps=2, seed=bad)
    assert torch.equal(process.perturb(x, 0.5, np.int64(3)), process.perturb(x, 0.5, 3))
    assert torch.equal(nets.start(2, np.uint8(3)), nets.start(2, 3))
    assert torch.equal(process.perturb(x, 0.5, (1 << 64) - 1), process.perturb(x, 0.5, (1 << 64) - 1))
    nets.sample(2, steps=2, seed=1 << 80)  # seeds of derived streams are hashed


def test_sizes_beyond_all_memory_are_refused(known):
    process, data, _, nets, *_ = known
    for ask in (
        lambda: vk.profile(data, queries=10**11),
        lambda: vk.profile(data, queries=10**30),
        lambda: vk.noise_fraction(data, process, 0.5, queries=10**13),
        lambda: nets.sample(10**13, steps=2),
        lambda: process.prior((10**9, 10**9)),
        lambda: process.times(10**400),
        lambda: vk.DDPM.linear(steps=10**13),
        lambda: vk.Empirical(torch.zeros(1).expand(10**12, 784)),
        lambda: vk.data.population("circle", 10**13),
    ):
        with pytest.raises(InputError, match="GiB are free"):
            ask()


def test_weights_that_become_nan_are_noticed(known):
    process, _, _, nets, trained, _ = known
    x, state = torch.zeros(2, 2), {k: a.clone() for k, a in trained.state.items()}
    ensemble = vk.Ensemble(trained.model, state, process, (2,))
    mean = ensemble.mean(x, 0.5)
    next(iter(state.values()))[1] = torch.nan  # after all was computed once
    others = trained.select([0, 2, 3, 4])
    assert ensemble.diverged == [1]
    assert not torch.equal(ensemble.mean(x, 0.5), mean)
    torch.testing.assert_close(ensemble.mean(x, 0.5), others.mean(x, 0.5))
    torch.testing.assert_close(ensemble.cov(x, 0.5).trace(), others.cov(x, 0.5).trace())
    with pytest.warns(UserWarning, match=r"indices \[1\].*are NaN"):
        assert ensemble(x, 0.5)[[0, 2, 3, 4]].isfinite().all()
    with pytest.warns(UserWarning, match="1 of 5 members diverged"):
        sampled = ensemble.sample(3, steps=4)
    torch.testing.assert_close(sampled[[0, 2, 3, 4]], trained.sample(3, steps=4)[[0, 2, 3, 4]])
    assert sampled[1].isnan().all()
    for ask in (lambda: ensemble[1](x, 0.5), lambda: ensemble.combine(torch.ones(2, 5))):
        with pytest.raises(InputError, match="diverged"):
            ask()
    for a in state.values():
        a.fill_(torch.nan)
    with pytest.raises(InputError, match="5 of 5 members diverged"):
        ensemble.mean(x, 0.5)
    broken = vk.Checkpoints([*nets.members, vk.as_score(lambda x, t: x * torch.nan, process, (2,))])
    for ask in (broken.mean, broken.cov, broken.split):
        with pytest.raises(InputError, match="1 of 4 members return NaN or infinite scores here: 3"):
            ask(x, 0.5)
    assert torch.func.vmap(lambda y: nets.mean(y, 0.5))(x).shape == x.shape  # values are hidden there
