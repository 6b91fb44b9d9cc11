"""Explanations of networks by theories against closed forms: networks that are theories, mixtures and noisy versions of
them."""

import functools
import math

import pytest
import torch

import vkernel as vk
from vkernel.reports.audit.levels import NoisyImages
from vkernel.reports.explain.candidates import Candidate
from vkernel.reports.explain.denoising import denoising
from vkernel.reports.explain.images import Split
from vkernel.reports.explain.samples import squared_correlation
from vkernel.theories import EquivariantLocal, Gaussian, Local, Nearest, Smoothed, Switch

PROCESS = vk.VP()
SMALL = {"levels": 3, "images": 6, "samples": 4, "steps": 4}


def fields(n: int, seed: int, shape: tuple[int, ...] = (1, 5, 5)) -> torch.Tensor:
    """Images whose neighbouring pixels are alike, and that are not Gaussian."""
    noise = torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return noise + noise.roll(1, -1) + noise.abs().roll(1, -2)


@pytest.fixture(scope="module")
def sets() -> tuple[vk.Empirical, vk.Empirical]:
    return vk.Empirical(fields(40, 0)), vk.Empirical(fields(30, 1))


def noisy_version(theory: vk.Score, scale: float, seed: int, shift: float = 0.0) -> vk.Score:
    """The denoiser of a theory, plus a constant, plus independent normal noise for each pixel of each image."""
    g = torch.Generator().manual_seed(seed)

    def denoise(x, t):
        noise = torch.randn(x.shape, generator=g, dtype=x.dtype)
        return theory.denoise(x, t) + shift + scale * noise

    return vk.as_score(denoise, PROCESS, predicts="x0", name=f"noisy {seed}")


def test_a_network_that_is_a_theory_is_explained_by_it_alone(sets):
    data, test = sets
    factories = {"own": functools.partial(Local, k=3), "gaussian": "gaussian", "exact": vk.EmpiricalScore}
    found = vk.explain(Local(data, PROCESS, 3), factories, data, test, **SMALL)
    for name in ("r2", "r2_low", "gain", "gain_low", "gain_high"):
        assert found.denoising[name].sel(theory="own").values == pytest.approx(1.0, abs=1e-9)
    assert found.denoising.gain.sel(theory="gaussian").values == pytest.approx(0.0, abs=1e-12)
    assert (found.denoising.gain_high.sel(theory="exact", images="held-out") < 1).all()
    samples = found.samples.sel(network="Local")
    assert float(samples.r2.sel(theory="own")) == pytest.approx(1.0, abs=1e-9)
    assert (samples.r2.sel(theory=["gaussian", "exact"]) < 0.99).all()
    assert found.best == {"Local": ("own",) * 3}
    assert found.well == {"Local": (True,) * 3}
    assert found.pictures["Local"]["own"].shape == (4, 1, 5, 5)
    torch.testing.assert_close(found.pictures["Local"]["own"], found.pictures["Local"]["Local"])
    assert not found.denoising.partner.values.any()
    assert found.denoising.ceiling.isnull().all()


def test_the_gain_of_a_part_of_a_mixture_is_that_of_its_share(sets):
    """With D = (1 - w) D_G + w D_th the gain of D_th is 1 - ((1 - w)/w)², whatever the images are."""
    data, test = sets
    network = Switch(Gaussian(data, PROCESS), vk.EmpiricalScore(data, PROCESS), at=1.0, width=1.0)
    found = vk.explain(network, "exact", data, test, **SMALL).denoising.isel(network=0, theory=0)
    w = 1 / (1 + found.ratio)
    for name in ("gain", "gain_low", "gain_high"):
        torch.testing.assert_close(
            torch.tensor(found[name].transpose("images", "level").values),
            torch.tensor((1 - ((1 - w) / w) ** 2).values).expand(2, 3),
            rtol=1e-6,
            atol=1e-6,
        )


def test_the_ceiling_of_two_noisy_networks_is_the_share_of_what_they_have_in_common():
    """Networks D_G + u + c z with independent z: ceiling and gain of D_G + u are |u|²/(|u|² + c² d)."""
    data, test = vk.Empirical(fields(90, 2)), vk.Empirical(fields(180, 3))
    gaussian, shift, scale = Gaussian(data, PROCESS), 0.3, 0.5
    common = vk.as_score(lambda x, t: gaussian.denoise(x, t) + shift, PROCESS, predicts="x0")
    networks = [noisy_version(gaussian, scale, seed, shift) for seed in (0, 1)]
    found = vk.explain(networks, [common], data, test, images=60, levels=2, samples=4, steps=2)
    expected, d = shift**2 / (shift**2 + scale**2), found.denoising
    for name in ("ceiling", "gain"):
        assert d[name].values == pytest.approx(expected, abs=0.05)
        assert (d[f"{name}_low"] < expected + 0.02).all()
        assert (d[f"{name}_high"] > expected - 0.02).all()
    assert d.partner.values.tolist() == ["noisy 1", "noisy 0"]


def test_intervals_cover_the_gain_of_the_law():
    """Errors of images that scatter by exponential factors: 95 % intervals cover the ratio of expectations."""
    covered, runs, images = 0, 80, 24
    data = vk.Empirical(fields(20, 4, (4,)))
    gaussian, t = Gaussian(data, PROCESS), torch.tensor([0.3], dtype=torch.float64)
    theory = vk.as_score(lambda x, t: gaussian.denoise(x, t) + 1.0, PROCESS, predicts="x0")
    for seed in range(runs):
        g = torch.Generator().manual_seed(seed)

        def denoise(x, t, g=g):
            size = torch.empty(len(x), 1, dtype=x.dtype).exponential_(generator=g)
            return theory.denoise(x, t) + size.sqrt() * torch.randn(x.shape, generator=g, dtype=x.dtype)

        net = vk.as_score(denoise, PROCESS, predicts="x0", shape=(4,))
        x0, keys = fields(images, 1000 + seed, (4,)), torch.randint(1 << 62, (1, 1, images), generator=g)
        noisy = {"training": NoisyImages(PROCESS, t, x0, keys)}
        table = denoising([net], {net.name: {"own": Candidate((theory,))}}, gaussian, noisy, lambda *_: None)[net.name]
        covered += table.gain_low.item() < 0.5 < table.gain_high.item()  # E|D - D_th|² = 4, E|D - D_G|² = 8
    assert covered >= 0.87 * runs


def test_floors_are_those_of_other_images_and_of_other_training_images(sets):
    data, test = sets
    split = Split.of(data, test, 6, 8, seed=3)
    constant = vk.as_score(lambda x, t: torch.zeros_like(x), PROCESS, predicts="x0", name="constant")
    network = vk.EmpiricalScore(split.rest, PROCESS)
    found = vk.explain(network, ["exact", constant], data, test, seed=3, **SMALL)
    exact, none = (found.denoising.isel(network=0).sel(theory=name) for name in ("exact", "constant"))
    assert exact.elsewhere.values == pytest.approx(1.0, abs=1e-9)  # the network has learned the held-out images
    assert found.samples.elsewhere.sel(theory="exact").item() == pytest.approx(1.0, abs=1e-9)
    assert (exact.gain < 0.9).all()
    assert (exact.permuted.isel(level=0) < 0).all()
    assert none.permuted.values == pytest.approx(none.gain.values)  # it does not depend on the image
    assert none.elsewhere.isnull().all()
    assert int(exact.points) == 40
    assert int(exact.points_elsewhere) == split.rest.n < 40


def test_errors_of_several_members_are_averaged(sets):
    """The gain of Scores is the mean of the gains of its members, and sample i is that of member i mod M."""
    data, _ = sets
    a, b = (vk.as_score(Smoothed(data, PROCESS, h), PROCESS, name=f"h = {h}") for h in (0.2, 0.8))
    given = {"both": vk.Checkpoints([a, b]), "a": a, "b": b}
    found = vk.explain(vk.EmpiricalScore(data, PROCESS), given, data, **SMALL)
    gain = found.denoising.gain.isel(network=0)
    assert gain.sel(theory="both").values == pytest.approx(gain.sel(theory=["a", "b"]).mean("theory").values)
    images = next(iter(found.pictures.values()))
    torch.testing.assert_close(images["both"], torch.stack([images["ab"[i % 2]][i] for i in range(4)]))


def test_networks_of_other_units_and_schedules_have_their_own_theories():
    """A network is the exact score of the same bytes in its own pixel range and under its own process."""
    pixels = (fields(24, 5).clamp(-2, 2) * 60 + 128).to(torch.uint8)
    data, networks = vk.Empirical(pixels), []
    for name, ends, process in (("a", (-1, 1), PROCESS), ("b", (0, 1), PROCESS), ("c", (-1, 1), vk.EDM())):
        units = vk.Empirical(pixels, scale=ends)
        networks.append(vk.as_score(vk.EmpiricalScore(units, process), process, range=ends, name=name))
    found = vk.explain(networks, ["exact", "gaussian"], data, **SMALL)
    assert found.denoising.gain.sel(theory="exact").values == pytest.approx(1.0, abs=1e-3)
    assert found.samples.r2.sel(theory="exact").values == pytest.approx(1.0, abs=1e-3)
    ratio = found.denoising.ratio.isel(level=-1)
    assert float(ratio.sel(network="a")) == pytest.approx(2 * float(ratio.sel(network="b")))
    assert found.denoising.ceiling.isnull().all()  # of no other network are the noisy images the same
    assert found.samples.ceiling.sel(network=["a", "b"]).values == pytest.approx(1.0, abs=1e-3)  # but samples are alike


def test_a_class_is_compared_with_theories_of_its_own_images(sets):
    data, test = sets
    labels, others = torch.arange(40) % 2, torch.arange(30) % 2
    exact = [vk.EmpiricalScore(data.subset((labels == c).nonzero().flatten()), PROCESS) for c in (0, 1)]
    network = vk.as_score(lambda x, t, c: exact[int(c[0])](x, t[0]), PROCESS, name="conditional")
    found = vk.explain(network, "exact", data, test, labels=labels, test_labels=others, **SMALL)
    assert found.networks == ("conditional, class 0", "conditional, class 1")
    assert found.denoising.gain.values == pytest.approx(1.0, abs=1e-9)
    assert found.denoising.points.values.tolist() == [[20], [20]]


def test_theories_are_fitted_apart_from_the_verdict(sets):
    data, test = sets
    found = vk.explain(EquivariantLocal(data, PROCESS, 3), ["equivariant", "smoothed"], data, test, **SMALL)
    assert found.denoising.gain.sel(theory="equivariant").values == pytest.approx(1.0, abs=1e-3)
    assert found.denoising.about.values.tolist()[0][0] == "k = 3"
    assert found.best["EquivariantLocal"] == ("equivariant",) * 3


@pytest.mark.parametrize(("n", "m"), [(200, 200), (40, 30), (3, 4), (2, 2)])
def test_no_image_has_two_uses(n, m):
    data, test = vk.Empirical(torch.arange(float(n))), vk.Empirical(1000 + torch.arange(float(m)))
    split = Split.of(data, test, images=12, fit=4, seed=0)
    rest = [] if split.rest is None else split.rest[:].flatten().tolist()
    held = split.verdict["held-out"].flatten().tolist()
    fit, own = split.fit.flatten().tolist(), split.verdict["training"].flatten().tolist()
    used = [*own, *held, *fit, *rest]
    assert len(used) == len(set(used))
    assert min(len(own), len(held)) >= 2
    assert {*own, *(x for x in fit if x < 1000)} <= {*split.first(5)[:].flatten().tolist()}
    assert sorted([*held, *rest, *(x for x in fit if x >= 1000)]) == test[:].flatten().tolist()
    assert n < 200 or (len(own), len(fit), split.elsewhere(50).n) == (12, 8, 50)


def test_theories_of_pixels_see_as_many_images_as_are_given(sets):
    data, test = sets
    theories = ["local", functools.partial(Local, k=1), Nearest, "pca"]
    found = vk.explain(Gaussian(data, PROCESS), theories, data, test, train=25, **SMALL)
    assert found.theories == ("local", "Local(k=1)", "Nearest", "pca")
    assert found.denoising.points.values.tolist() == [[25, 25, 40, 25]]


def test_vectors_without_a_test_set_and_networks_that_are_not_finite():
    data = vk.Empirical(fields(30, 6, (4,)))
    exact = vk.EmpiricalScore(data, PROCESS)

    def broken(x, t):
        s = exact(x.nan_to_num(), t)
        return torch.where(x[:, :1] > 0, s, math.nan)

    found = vk.explain([exact, broken], None, data, process=PROCESS, **SMALL)
    assert found.theories == ("gaussian", "exact", "smoothed")
    assert len(found.notes) == 3
    assert found.denoising.images.values.tolist() == ["training"]
    assert found.denoising.elsewhere.isnull().all()
    assert found.samples.frechet.isnull().all()
    gain = found.denoising.gain.sel(theory="exact")
    assert gain.sel(network="EmpiricalScore").values == pytest.approx(1.0, abs=1e-9)
    known = gain.sel(network="broken").values
    assert known[~(known != known)] == pytest.approx(1.0, abs=1e-9)  # of the images on which it is finite
    assert float(found.samples.own_copies.sel(network="EmpiricalScore")) >= 0.5


def test_what_cannot_be_explained_is_refused(sets):
    data, test = sets
    net, refused = Gaussian(data, PROCESS), pytest.raises
    with refused(vk.InputError, match="Give data="):
        vk.explain(net)
    with refused(vk.InputError, match="A theory"):
        vk.explain(net, "wiener", data)
    with refused(vk.InputError, match="give a name|must be a name"):
        vk.explain(net, [3], data)
    with refused(vk.InputError, match="function \\(data, process\\)"):
        vk.explain(net, [Gaussian(data, vk.EDM())], data)
    with refused(vk.InputError, match="compares pixels of images"):
        vk.explain(vk.EmpiricalScore(fields(20, 7, (4,)), PROCESS), ["local"], fields(20, 7, (4,)))
    with refused(vk.InputError, match="images are equal"):
        vk.explain(net, None, torch.ones(9, 1, 5, 5))
    with refused(vk.InputError, match="one training image"):
        vk.explain(net, None, data.subset([0]))
    with refused(vk.InputError, match="images"):
        vk.explain(net, None, data, test, images=1)


def test_the_correlation_of_pixels_is_numpys():
    a, b = fields(5, 8), fields(5, 9)
    expected = [torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1] ** 2 for x, y in zip(a, b, strict=True)]
    torch.testing.assert_close(squared_correlation(a, 3 - 2 * b), torch.stack(expected))
    assert float(squared_correlation(a[:1], torch.ones_like(a[:1]))) == 0


def test_a_theory_with_the_name_of_a_network_has_samples_of_its_own(sets):
    data, test = sets
    network, other = (Local(data, PROCESS, k) for k in (1, 5))
    found = vk.explain(network, [other], data, test, **SMALL)
    assert found.theories == ("Local (theory)",)
    assert list(found.pictures["Local"]) == ["Local", "Local (theory)"]
    assert not torch.equal(*found.pictures["Local"].values())
