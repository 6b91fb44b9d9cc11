"""Theory against ensembles: exact where the ensemble is drawn from the kernel itself, honest where it is not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import vkernel as vk
from vkernel import plots
from vkernel.core.errors import InputError
from vkernel.core.estimate import jackknife_se
from vkernel.kernels import Function, Measured, Naive
from vkernel.kernels.linear import LinearField
from vkernel.reports.compare import _left_out, compare, draw_laws, table
from vkernel.sample import effective_sde, semiclassical
from vkernel.sample.scores import Groups

PROCESS = vk.VP(eps=0.01)
DATA = vk.Empirical(torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64))
SCORE = vk.EmpiricalScore(DATA, PROCESS)
FEATURES = vk.features.grid("gaussian", 5, 1, -1.5, 1.5, PROCESS)
MODEL = vk.models.Linear(FEATURES, "x0", 0.1)
X, T = torch.linspace(-1.2, 1.2, 9, dtype=torch.float64)[:, None], [0.05, 0.2, 0.5]
SMALL = {"samples": 60, "steps": 15, "bins": 20}


def truth(dim: int = 1, scale: float = 0.05, model: vk.models.Linear = MODEL) -> LinearField:
    """A kernel whose ensemble can be drawn: Gaussian weights around the fit of a trained model."""
    data = DATA if dim == 1 else vk.Empirical(torch.tensor([[-1.0, 0.0], [1.0, 0.5]], dtype=torch.float64))
    mean = vk.train_ensemble(model, data, PROCESS, members=1, draws=20_000, progress=False).state["weights"][0]
    size = mean.numel()
    return LinearField(model, PROCESS, scale**2 * torch.eye(size, dtype=torch.float64), mean)


def drawn(V: LinearField, members: int, seed: int = 0, factor: float = 1.0) -> vk.Ensemble:
    z = torch.randn(members, len(V.root), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights = V.mean_weights + math.sqrt(factor) * (z @ V.root).reshape(members, *V.mean_weights.shape)
    return vk.Ensemble(V.model, {"weights": weights}, PROCESS, (V.mean_weights.shape[-1],))


EXACT = truth()
ENSEMBLE = drawn(EXACT, 300)


@pytest.fixture(scope="module")
def exact():
    return compare(ENSEMBLE, EXACT, X, T, score=SCORE, samples=200, steps=20, bins=30)


def test_an_exact_kernel_has_ratio_one_within_its_errors(exact):
    assert abs(float(exact.ratio_pooled) - 1) < 3 * float(exact.ratio_pooled_se)
    z = (exact.ratio - 1) / exact.ratio_se
    assert float(abs(z).max()) < 4
    assert float(abs(z).mean()) > 0.1  # errors are of the right size, not just large
    gap = (exact.mean_measured - exact.mean_predicted) / exact.mean_measured_se
    assert float(abs(gap).max()) < 4
    cross = (exact.cross_measured - exact.cross_predicted) / exact.cross_measured_se
    assert cross.dims == ("pair", "x")
    assert float(abs(cross).max()) < 4


def test_its_gaussian_closure_is_within_the_floor(exact):
    assert float(exact.tv_closure) < 1.25 * float(exact.tv_floor)
    assert float(exact.tv_field) < 1.4 * float(exact.tv_floor)
    assert float(exact.tv_closure_low) <= float(exact.tv_closure) <= float(exact.tv_closure_high)
    assert float(exact.skewed_share) < 0.3
    assert exact.attrs["summary"].startswith("theory within ")
    assert "by chance" in exact.attrs["summary"]


def test_densities_are_normalised_up_to_what_is_outside(exact):
    width = float(exact.bin[1] - exact.bin[0])
    mass = exact.density.sum("bin") * width
    assert exact.density.dims == ("law", "bin")
    assert float(mass.sel(law="ensemble")) == pytest.approx(1, abs=0.01)
    assert bool((mass > 0.9).all())


def test_labels_and_units(exact):
    assert exact.ratio.sel(t=0.2).sel(x=0.3, method="nearest").shape == ()
    assert exact.measured.dims == ("t", "x")
    assert exact.skewness.dims == ("t", "x", "axis")
    assert list(exact.index.values) == list(range(9))
    np.testing.assert_allclose(exact.place[:, 0], exact.x)
    for name in exact.data_vars:
        assert exact[name].attrs["long_name"], name
    assert exact.measured.attrs["units"] == "1/(data unit)²"
    assert "standard error" in exact.ratio_se.attrs["long_name"]
    assert "diverged" in exact.lost_semiclassical.attrs["long_name"]
    assert "finite" in exact.tv_field_floor.attrs["long_name"]
    np.testing.assert_allclose(exact.relative_error, abs(exact.ratio_pooled - 1))


def test_the_bulk_is_where_the_noised_data_are():
    x = torch.tensor([[-3.0], [-1.0], [0.5], [1.0], [2.0]], dtype=torch.float64)
    ds = compare(ENSEMBLE, EXACT, x, [0.02, 0.5], score=SCORE, laws=False)
    density = SCORE.posterior(x, 0.02).logp.exp()
    assert ds.bulk.sel(t=0.02).values.tolist() == (density > 1e-3 * density.max()).tolist()
    assert ds.bulk.sel(t=0.02).values.tolist() == [False, True, False, True, False]
    assert bool(ds.bulk.sel(t=0.5)[1:4].all())
    pooled = (ds.measured.where(ds.bulk).sum("x") / ds.predicted.where(ds.bulk).sum("x")).mean()
    assert float(ds.ratio_pooled) == pytest.approx(float(pooled))
    assert bool(compare(ENSEMBLE, EXACT, x, 0.02, laws=False).bulk.all())


@pytest.mark.parametrize("names", [None, list("aabbbcdd")])
def test_left_out_values_are_those_without_each_unit(names):
    """The closed form for independent members, and the loop over groups, against the definition."""
    s = torch.randn(8, 2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    groups, target = Groups.of(names, 8), torch.ones(2, 3, 4, dtype=torch.float64)
    found = _left_out(s, groups, target)
    assert found.shape == (groups.units, 2 + 1 + 2, 3)
    for value, kept in zip(found, groups.without(), strict=True):
        rest, design = s[kept], groups.keep(kept)
        torch.testing.assert_close(value[:2], design.factors(rest).square().sum((0, -1)))
        distance = (rest.mean(0) - target).square().sum(-1) - design.of_mean(rest).sum(-1)
        torch.testing.assert_close(value[3:], distance)
        if names is None:
            torch.testing.assert_close(value[:2], rest.var(0).sum(-1))
    left = torch.stack([torch.cat([s[:k], s[k + 1 :]]).var(0).sum(-1) for k in range(8)])
    if names is None:
        expected = (7 / 8 * (left - left.mean(0)).square().sum(0)).sqrt()
        torch.testing.assert_close(jackknife_se(found)[:2], expected)


def test_the_error_of_the_pooled_ratio_is_the_spread_of_ensembles():
    found = [compare(drawn(EXACT, 40, seed), EXACT, X, T, laws=False) for seed in range(30)]
    values, errors = ([float(ds[n]) for ds in found] for n in ("ratio_pooled", "ratio_pooled_se"))
    assert np.mean(errors) == pytest.approx(np.std(values, ddof=1), rel=0.4)
    assert np.mean(values) == pytest.approx(1, abs=3.5 * np.std(values, ddof=1) / math.sqrt(30))


def uncertain(seed: int, units: int = 8, draws: int = 20) -> LinearField:
    """The exact kernel as it is known from ``units`` × ``draws`` models, with estimates of each unit."""
    z = drawn(EXACT, units * draws, 1000 + seed).state["weights"][..., 0] - EXACT.mean_weights[:, 0]
    groups = torch.stack([part.mT @ part / draws for part in z.chunk(units)])
    return LinearField(MODEL, PROCESS, groups.mean(0), EXACT.mean_weights, groups)


def test_intervals_cover_the_truth_and_the_verdict_is_seldom_wrong_where_V_itself_has_an_error():
    """Ensembles of 30 members of the kernel itself, which is known from 160 models: both errors matter."""
    found = [compare(drawn(EXACT, 30, seed), uncertain(seed), X, T, laws=False) for seed in range(150)]
    names = ("ratio_pooled", *(f"ratio_by_time {k}" for k in range(3)))
    for name in names:
        stem, _, k = name.partition(" ")
        low, high = (
            np.array([ds[f"{stem}_{end}"].values.flat[int(k or 0)] for ds in found]) for end in ("low", "high")
        )
        share = float(((low <= 1) & (high >= 1)).mean())
        assert 0.9 <= share <= 0.99, (name, share)  # 95 %: 136 to 148 of 150
    alarms = sum(not bool(ds.agrees) for ds in found)
    assert alarms <= 7  # 1 % is nominal; with 30 members the jackknife's tails give 2 %
    assert all(("theory within" in ds.attrs["summary"]) == bool(ds.agrees) for ds in found)
    without = [compare(drawn(EXACT, 30, seed), EXACT, X, T, laws=False) for seed in range(3)]
    assert all(float(a.ratio_pooled_se) > float(b.ratio_pooled_se) for a, b in zip(found, without, strict=False))


def test_a_kernel_wrong_by_two_is_called_wrong_by_two():
    ds = compare(drawn(EXACT, 300, factor=2.0), EXACT, X, T, laws=False)
    assert float(ds.ratio_pooled) == pytest.approx(2, abs=3 * float(ds.ratio_pooled_se))
    assert "the measured variance is 2 " in ds.attrs["summary"] or "is 1.9 " in ds.attrs["summary"]
    assert "theory within" not in ds.attrs["summary"]
    assert "tv_field" not in ds


def test_progress_goes_from_0_to_1():
    shares: list[float] = []
    compare(ENSEMBLE[:5], EXACT, X, T, samples=6, steps=5, progress=lambda label, share: shares.append(share))
    assert len(shares) > 5
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)


@pytest.mark.parametrize(("method", "spacing"), [("euler", "uniform"), ("exponential", "log")])
def test_laws_are_those_of_the_samplers(method, spacing):
    few = ENSEMBLE[:5]
    x_T, source = few.start(6, 0), vk.core.rng.stream(0, "compare/fields")
    laws = draw_laws(few, EXACT, 6, 4, 0, method, {"steps": 10, "spacing": spacing}, lambda label, done=1.0: None)
    with pytest.warns(vk.kernels.ValidityWarning):
        closure = Measured(few)
    args = {"mean": few.mean_score, "steps": 10, "spacing": spacing}
    for name, V in (("closure", closure), ("field", EXACT)):
        expected = effective_sde(V, x_T, members=4, method=method, generator=source, **args)
        torch.testing.assert_close(laws[name], expected, rtol=1e-8, atol=1e-8)
    mean, cov = semiclassical(EXACT, x_T, **args)
    z = vk.core.rng.randn((4, *cov.factors.shape[:2]), source, mean.device, torch.float64)
    torch.testing.assert_close(laws["semiclassical"], mean + (z[..., None] * cov.factors).sum(1))


def test_a_trained_ensemble_agrees_with_the_linear_kernel():
    features = vk.features.grid("gaussian", 3, 1, -1.5, 1.5, PROCESS)
    model = vk.models.Linear(features, "x0", 0.1)
    P = 20 * features.count
    ens = vk.train_ensemble(model, DATA, PROCESS, members=200, draws=P, progress=False)
    V = vk.kernels.Linear(model, DATA, PROCESS, draws=P, sets=128)
    ds = compare(ens, V, X, T, score=SCORE, **SMALL)
    assert float(ds.relative_error) < max(0.15, 3 * float(ds.relative_error_se))
    assert "tv_semiclassical" in ds


def test_conditions_are_a_dimension_and_the_sentence_gives_their_range():
    ensembles = [ENSEMBLE, drawn(EXACT, 300, 1), drawn(EXACT, 300, 2, factor=2.5)]
    ds = compare(ensembles, [EXACT] * 3, X, T, labels=[0.25, 0.5, 4.0], by="F/P", **SMALL)
    assert ds.ratio.dims == ("condition", "t", "x")
    assert float(ds.ratio_pooled.sel(condition=4.0)) == pytest.approx(2.5, rel=0.2)
    words = ds.attrs["summary"]
    assert "for F/P ≤ 0.5; at F/P = 4 the measured variance is 2." in words
    rows = ds.attrs["table"].splitlines()
    assert rows[0].split()[0] == "F/P"
    assert [row.split()[0] for row in rows[1:4]] == ["0.25", "0.5", "4"]
    assert len({len(row) for row in rows[:4]}) == 1
    names = compare(ensembles, [EXACT] * 3, X, T, labels=["a", "b", "c"], by="run", laws=False)
    assert "for run = a, b; at run = c" in names.attrs["summary"]
    assert table(names).startswith("run")


def test_conditions_are_labelled_by_features_over_draws():
    kernels = [vk.kernels.Linear(MODEL, DATA, PROCESS, draws=P, sets=16) for P in (50, 200)]
    ds = compare([ENSEMBLE, ENSEMBLE], kernels, X, 0.2, laws=False)
    assert ds.condition.values.tolist() == [0.5, 0.125]
    assert ds.condition.attrs["long_name"] == "F/P"


def test_two_dimensions():
    features = vk.features.grid("gaussian", 3, 2, -1.5, 1.5, PROCESS)
    V = truth(2, 0.05, vk.models.Linear(features, "x0", 0.1))
    x = torch.tensor([[-1.0, 0.0], [0.0, 0.0], [1.0, 0.5]], dtype=torch.float64)
    ds = compare(drawn(V, 60), V, x, [0.1, 0.4], samples=30, steps=8, bins=10)
    assert ds.density.dims == ("law", "bin", "bin2")
    assert ds.x.values.tolist() == [0, 1, 2]
    assert ds.place.shape == (3, 2)
    assert float(ds.ratio_pooled) == pytest.approx(1, abs=4 * float(ds.ratio_pooled_se))
    axes = plots.comparison(ds).axes
    assert [ax.get_title() for ax in axes[2:5]] == ["trained ensemble", "Gaussian field of V", "semiclassical"]


def test_a_member_that_diverged_is_left_out_and_counted():
    state = ENSEMBLE.state["weights"][:40].clone()
    state[3] = torch.nan
    broken = vk.Ensemble(MODEL, {"weights": state}, PROCESS, (1,))
    kept = [k for k in range(40) if k != 3]
    whole = vk.Ensemble(MODEL, {"weights": state[kept]}, PROCESS, (1,))
    one, two = (compare(e, EXACT, X, T, **SMALL) for e in (broken, whole))
    np.testing.assert_allclose(one.measured, two.measured)
    assert (int(one.members), int(one.lost_ensemble), int(two.lost_ensemble)) == (39, 1, 0)
    assert "diverged: 1 of the ensemble" in one.attrs["summary"]


class Wild(LinearField):
    """The first ``lost`` of the fields it draws run away."""

    lost = 2

    def draw(self, members, generator=None):
        field = super().draw(members, generator)

        def wild(x, t):
            change = field(x, t)
            change[: self.lost] = torch.inf
            return change

        return wild


@pytest.mark.parametrize("lost", [2, 30])
def test_fields_that_diverge_are_left_out_and_counted(lost):
    wild = Wild(MODEL, PROCESS, EXACT.root @ EXACT.root, EXACT.mean_weights)
    wild.lost = lost
    ds = compare(ENSEMBLE[:30], wild, X, T, **SMALL)
    assert (int(ds.lost_field), int(ds.lost_closure)) == (lost, 0)
    assert math.isfinite(float(ds.tv_field)) == (lost < 30)
    assert bool(ds.density.sel(law="field").isnull().all()) == (lost == 30)
    assert f"because they diverged: {lost} of the field" in ds.attrs["summary"]
    assert "nan" not in ds.attrs["summary"]
    assert plots.comparison(ds).axes


def test_a_kernel_that_doubts_itself_is_quoted():
    doubtful = truth()
    doubtful.valid, doubtful.why = False, "the moon is full."
    words = compare(ENSEMBLE, doubtful, X, T, laws=False).attrs["summary"]
    assert "the kernel is not valid (the moon is full)." in words


def test_a_kernel_without_factors_gets_a_field_for_every_start():
    kernel = Function(lambda x, t, y, u: EXACT.cov(x, t, y, u).dense(), PROCESS)
    assert "tv_field" not in compare(ENSEMBLE[:60], kernel, X, [0.2])  # slow: only if asked for
    ds = compare(ENSEMBLE[:60], kernel, X, [0.2], samples=80, steps=6, bins=12, laws=True)
    reference = compare(ENSEMBLE[:60], EXACT, X, [0.2], samples=80, steps=6, bins=12)
    np.testing.assert_allclose(ds.predicted, reference.predicted)
    assert float(ds.tv_field) < 2 * float(ds.tv_field_floor)
    assert math.isnan(float(ds.tv_semiclassical))
    assert "semiclassical" not in ds.attrs["summary"]


def test_networks_can_be_compared_with_their_own_covariance():
    net = vk.models.MLP(width=8, depth=1, steps=20, batch=16)
    ens = vk.train_ensemble(net, DATA, PROCESS, members=24, progress=False)
    ds = compare(ens, Measured(ens), X, [0.2], samples=10, steps=5, bins=8)
    np.testing.assert_allclose(ds.ratio, 1, rtol=1e-5)
    assert float(ds.tv_field) == float(ds.tv_closure)
    assert math.isfinite(float(ds.tv_semiclassical))


def test_the_same_seed_gives_the_same_numbers(exact):
    again = compare(ENSEMBLE, EXACT, X, T, score=SCORE, samples=200, steps=20, bins=30)
    assert again.equals(exact)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"V": Naive(SCORE, 0.1)}, "white"),
        ({"V": "a kernel"}, "V-kernel"),
        ({"ens": EXACT}, "Ensemble"),
        ({"ens": ENSEMBLE[:2]}, "three finite members"),
        ({"V": [EXACT, EXACT]}, "one kernel for each"),
        ({"x": torch.zeros(3, 2)}, "event shape"),
        ({"x": torch.tensor([[math.nan]])}, "finite"),
        ({"t": [0.2, 0.2]}, "different"),
        ({"t": 7.0}, "t"),
        ({"t": "noon"}, "t must be"),
        ({"t": []}, "t must be"),
        ({"fields": 1}, "two fields"),
        ({"score": "data"}, "EmpiricalScore"),
        ({"ens": [ENSEMBLE], "V": [EXACT], "labels": [1.0, 2.0]}, "labels"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(change, sentence):
    given = {"ens": ENSEMBLE, "V": EXACT, "x": X, "t": T, "laws": False} | change
    with pytest.raises(InputError, match=sentence):
        compare(given.pop("ens"), given.pop("V"), given.pop("x"), given.pop("t"), **given)


def test_another_process_is_refused():
    other = LinearField(MODEL, vk.VPSong(eps=0.01), torch.eye(FEATURES.count).double(), EXACT.mean_weights)
    with pytest.raises(InputError, match="process"):
        compare(ENSEMBLE, other, X, T)


@pytest.mark.parametrize("dark", [False, True])
def test_the_figure_has_axes_that_say_what_they_are(exact, dark):
    with plots.style(dark=dark):
        picture = plots.comparison(exact)
    assert {ax.get_xlabel() for ax in picture.axes} >= {"x (data unit)", "x at eps (data unit)", "skewness"}
    assert all(ax.get_ylabel() for ax in picture.axes)
    told = [text.get_text() for text in picture.legends[0].get_texts()]
    assert "predicted by V" in told
    assert "t = 0.05" in told
    assert plots.to_bytes(picture, dpi=40).startswith(b"\x89PNG")


def test_the_package_gives_the_function():
    assert vk.compare is compare


# --- checkpoints, groups, theories of the mean ------------------------------------------------------------------------


def test_checkpoints_give_the_numbers_of_the_ensemble():
    few = ENSEMBLE[:8]
    nets = vk.Checkpoints([few[m] for m in range(8)])
    one, two = (compare(s, EXACT, X, T, **SMALL) for s in (few, nets))
    np.testing.assert_allclose(one.measured, two.measured, rtol=1e-5)  # checkpoints are in float32
    np.testing.assert_allclose(one.ratio_pooled_se, two.ratio_pooled_se, rtol=1e-4)
    assert math.isfinite(float(two.tv_closure))


def test_groups_of_checkpoints_are_the_units_of_the_error():
    names = list("aabbccdd")
    nets = vk.Checkpoints([ENSEMBLE[m] for m in range(8)], groups=names)
    ds = compare(nets, EXACT, X, [0.2], laws=False)
    np.testing.assert_allclose(ds.measured[0], nets.cov(X.float(), 0.2).trace(), rtol=1e-4)
    left = [vk.Checkpoints([ENSEMBLE[m] for m in k], groups=[names[m] for m in k]) for k in nets.groups.without()]
    values = np.array([float((n.cov(X, 0.2).trace() / EXACT.cov(X, 0.2).trace().sum()).sum()) for n in left])
    expected = math.sqrt(3 / 4 * ((values - values.mean()) ** 2).sum())
    assert float(ds.ratio_pooled_se) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("members", [3, 4])
def test_few_members_have_variances_but_no_cumulants(members):
    ds = compare(ENSEMBLE[:members], EXACT, X, T, **SMALL)
    np.testing.assert_allclose(ds.measured.sel(t=0.2), ENSEMBLE(X, 0.2)[:members].var(0).sum(-1))
    assert bool(ds.skewness.isnull().all())
    assert ("density" in ds) == (members == 4)
    assert plots.to_bytes(plots.comparison(ds), dpi=40)


def test_a_score_is_compared_with_the_mean_of_the_members():
    ds = compare(ENSEMBLE, EXACT.mean, X, T, score=SCORE, **SMALL)
    assert abs(float(ds.mean_error_pooled)) < 4 * float(ds.mean_error_pooled_se)
    assert "ratio" not in ds
    assert "the mean score differs from the theory by" in ds.attrs["summary"]
    assert ds.attrs["table"].splitlines()[0].split()[-1] == "floor"
    wrong = compare(ENSEMBLE, SCORE, X, T, score=SCORE, **SMALL)
    s, theory = ENSEMBLE(X, 0.2), SCORE(X, 0.2)
    inside = torch.as_tensor(wrong.bulk.sel(t=0.2).values)
    distance = ((s.mean(0) - theory).square() - s.var(0) / len(s)).sum(-1)[inside].sum()
    expected = float(distance / theory.square().sum(-1)[inside].sum())
    assert float(wrong.mean_error_by_time.sel(t=0.2)) == pytest.approx(expected)
    assert float(wrong.tv_theory) > float(ds.tv_theory)
    for name in wrong.data_vars:
        assert wrong[name].attrs["long_name"], name
