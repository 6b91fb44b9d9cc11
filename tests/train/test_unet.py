"""U-Nets of any depth: parameters counted by hand, attention, dropout, classes and flips."""

from __future__ import annotations

import json
import math
import warnings

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

import vkernel as vk
from vkernel.core import rng
from vkernel.core.errors import InputError
from vkernel.train.models.unet import UNet, _Attention, _Block, dropped
from vkernel.train.objectives import Training

PROCESS = vk.EDM()
TINY = {"channels": (8, 16), "steps": 2, "batch": 4, "ema": None, "dtype": "float64"}
FULL = {"attention": (1,), "heads": 2, "dropout": 0.3, "classes": 3}
LABELS = torch.tensor([0, 2, 2, 0, 2])
TEN_MILLION = {"channels": (96, 192, 256), "blocks": 2, "attention": (1, 2)}  # as in the docs


def images(*shape: int, n: int = 5) -> Tensor:
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).clamp(-1, 1)


def training(model: UNet, *shape: int, **options: object) -> Training:
    labels = LABELS if model.classes else None
    return Training(vk.Empirical(images(*shape)), PROCESS, "J1", None, seed=3, labels=labels, **options)


def quiet(share: float) -> None:
    pass


def moved(model: UNet, *shape: int) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """Parameters of two members none of which is zero, and draws of one step."""
    given = training(model, *shape)
    state = model.initial(given, [0, 1])
    g = torch.Generator().manual_seed(7)
    state = {k: p + 0.1 * torch.randn(p.shape, generator=g, dtype=torch.float64).to(p) for k, p in state.items()}
    return state, next(iter(model.minibatches(given, [0, 1])))


# -------------------- architecture


def parameters(colours: int, channels: tuple[int, ...], blocks: int, attention=(), time: int = 17, classes: int = 0):
    """The number of parameters, layer by layer."""
    width = 2 * channels[1]

    def conv(i: int, o: int, side: int) -> int:
        return o * i * side**2 + o

    def level(k: int, i: int, count: int) -> int:
        o = channels[k]
        total = 0
        for a in [i] + [o] * (count - 1):
            total += 2 * a + 2 * o + conv(a, o, 3) + conv(o, o, 3) + conv(width, o, 1) + (a != o) * conv(a, o, 1)
            total += (k in attention) * (2 * o + conv(o, 3 * o, 1) + conv(o, o, 1))
        return total

    low = len(channels) - 1
    total = conv(time, width, 1) + conv(width, width, 1) + classes * width
    total += conv(colours, channels[0], 3) + 2 * channels[0] + conv(channels[0], colours, 3)
    for k in range(low):
        total += level(k, channels[max(k - 1, 0)], blocks) + conv(channels[k], channels[k], 3)
        total += level(k, channels[k] + channels[k + 1], blocks)
    return total + level(low, channels[low - 1], blocks + 1)


@pytest.mark.parametrize(
    ("shape", "options", "count"),
    [
        ((28, 28), {}, 491_169),
        ((3, 32, 32), TEN_MILLION, 10_045_603),
        ((8, 8), {"channels": (8, 16)}, None),
        ((3, 16, 8), {"channels": (8, 8, 16, 32), "blocks": 3, "attention": (0, 3), "classes": 7}, None),
    ],
)
def test_parameters_are_counted_by_hand(shape, options, count):
    model = UNet(**options)
    colours = shape[0] if len(shape) == 3 else 1
    want = parameters(colours, model.channels, model.blocks, model.attention, classes=model.classes or 0)
    assert sum(p.numel() for p in model._module(shape).parameters()) == want == (count or want)


@pytest.mark.parametrize("shape", [(4, 4), (1, 2, 6), (3, 32, 8)])
@pytest.mark.parametrize("channels", [(8, 16), (16, 8, 16, 8)])
def test_any_number_of_levels(channels, shape):
    if shape[-1] % 2 ** (len(channels) - 1) or shape[-2] % 2 ** (len(channels) - 1):
        with pytest.raises(InputError, match=r"U-Net of 4 levels takes images whose sides are divisible by 8; got \("):
            UNet(channels)._module(shape)
        return
    model = UNet(**TINY | {"channels": channels, "attention": tuple(range(len(channels)))})
    state, (z, e, *_) = moved(model, *shape)
    out = vmap(model.function)(state, z, e)
    assert out.shape == z.shape
    assert out.isfinite().all()
    z = z[0, :1].requires_grad_()  # every pixel of the input acts on the first one of the output, by attention
    first = model.function({k: p[0] for k, p in state.items()}, z, e[0, :1]).flatten()[0]
    assert (torch.autograd.grad(first, z)[0] != 0).all()


def test_a_network_starts_at_zero_whatever_its_parts():
    model = UNet(**TINY | FULL)
    given = training(model, 8, 8)
    state = model.initial(given, [0, 1])
    assert float(model.given(2).output(state, images(8, 8)[None], torch.ones(1, 5), PROCESS).abs().max()) == 0
    zero = {name for name, p in state.items() if p.ndim > 2 and not p.any()}
    assert {n.split(".")[-2] for n in zero} == {"second", "out", "last"}
    assert float(state["label.weight"].std()) == pytest.approx((1 / 3) ** 0.5, rel=0.2)


# -------------------- attention


@pytest.mark.parametrize("heads", [1, 4])
def test_attention_is_a_mean_over_pixels_and_equivariant(heads):
    g = torch.Generator().manual_seed(0)
    layer = _Attention(16, heads).double()
    own = {k: torch.randn(p.shape, generator=g, dtype=torch.float64) for k, p in layer.named_parameters()}
    h = torch.randn(2, 16, 3, 4, generator=g, dtype=torch.float64)
    out = functional_call(layer, own, (h,))
    order = torch.randperm(12, generator=g)
    turned = functional_call(layer, own, (h.flatten(2)[..., order].reshape(h.shape),))
    torch.testing.assert_close(turned, out.flatten(2)[..., order].reshape(h.shape))
    # by torch's own layer: the same matrices, pixels as a sequence
    other = torch.nn.MultiheadAttention(16, heads, batch_first=True, dtype=torch.float64)
    matrices = {"in_proj_weight": own["qkv.weight"][..., 0, 0], "in_proj_bias": own["qkv.bias"]}
    matrices |= {"out_proj.weight": own["out.weight"][..., 0, 0], "out_proj.bias": own["out.bias"]}
    n = torch.nn.functional.group_norm(h, 8, own["norm.weight"], own["norm.bias"]).flatten(2).mT
    want = h.flatten(2).mT + functional_call(other, matrices, (n, n, n))[0]
    torch.testing.assert_close(out.flatten(2).mT, want)


def test_divergence_of_a_network_with_attention():
    """Forward derivatives, which divergences take, against the Jacobian of central differences."""
    model = UNet(**TINY | {"attention": (0, 1)})
    state, _ = moved(model, 4, 4)
    ens = vk.train.ensemble.Ensemble(model, state, PROCESS, (4, 4))
    x, t, h = images(4, 4, n=1), 0.8, 1e-5
    steps = h * torch.eye(16, dtype=torch.float64).reshape(16, 4, 4)
    along = ((ens[1](x + steps, t) - ens[1](x - steps, t)).flatten(1).diagonal() / (2 * h)).sum()
    signs = 4 * torch.eye(16, dtype=torch.float64).reshape(16, 1, 4, 4)  # an orthogonal basis: the trace is exact
    torch.testing.assert_close(ens[1].divergence(x, t, probes=signs)[0], along, rtol=1e-6, atol=1e-6)


# -------------------- dropout


def test_masks_keep_the_mean_and_are_of_the_right_share():
    h, key = torch.ones(64, 8, 9, 7), torch.tensor([11])
    assert dropped(h, 1 - 1e-9, key).isfinite().all()
    for p in (0.1, 0.5, 0.9):
        out = dropped(h, p, key)
        kept = float((out > 0).double().mean())
        assert abs(kept - (1 - p)) < 5 * (p * (1 - p) / h.numel()) ** 0.5
        assert float(out.max()) == pytest.approx(1 / (1 - p), rel=1e-4)
        assert float(out.max()) * round((1 - p) * 2**16) / 2**16 == pytest.approx(1, rel=1e-6)  # the mean is h exactly
    other = dropped(h, 0.5, key + 1) > 0
    agree = float((other == (dropped(h, 0.5, key) > 0)).double().mean())
    assert abs(agree - 0.5) < 5 * 0.5 / h.numel() ** 0.5
    # neighbours, which share a hash, are independent too
    flat = other.flatten().double() - 0.5
    for lag in (1, 2, 3, 4):
        assert abs(float((flat[lag:] * flat[:-lag]).mean()) * 4) < 5 / h.numel() ** 0.5


def test_masks_depend_on_seed_member_step_and_layer_alone():
    """The output of a member by its own key, whichever members stand beside it; steps, members and seeds differ."""
    model = UNet(**TINY | {"dropout": 0.4, "steps": 3})
    keys = {}
    for members in ([0, 1, 2], [2, 0], [1]):
        for step, (*_, key) in enumerate(model.minibatches(training(model, 8, 8), members)):
            assert key.shape == (len(members), 1)
            for m, k in zip(members, key.flatten().tolist(), strict=True):
                assert keys.setdefault((m, step), k) == k
    assert len(set(keys.values())) == 9
    want = rng.hashed(torch.tensor(rng.key(3, "ensemble/order/dropout", 2)), torch.tensor(1))
    assert keys[2, 1] == int(want)
    assert sorted(b.layer for b in model._module((8, 8)).modules() if isinstance(b, _Block)) == [0, 1, 2, 3]
    held = [k for *_, k in model.minibatches(training(model, 8, 8, vary=("init", "inputs")), [0, 1])]
    assert all(torch.equal(k[0], k[1]) for k in held)


@pytest.mark.parametrize("options", [{}, FULL, {"dropout": 0.5}], ids=str)
def test_members_at_once_are_members_one_by_one(options):
    found = []
    for chunk in (1, 3):
        model = UNet(**TINY | options | {"steps": 3}, chunk=chunk)
        found.append(model.fit(training(model, 8, 8), [0, 4, 2], quiet))
    for name, p in found[0].items():
        torch.testing.assert_close(p, found[1][name], rtol=1e-7, atol=1e-10)
        assert p.isfinite().all()
    alone = model.fit(training(model, 8, 8), [4], quiet)
    for name, p in alone.items():
        torch.testing.assert_close(p[0], found[0][name][1], rtol=1e-7, atol=1e-10)


def test_twins_share_masks_and_labels_and_a_training_that_goes_on_has_those_of_its_steps():
    model, points = UNet(**TINY | FULL | {"steps": 3}), images(8, 8)
    how = {"members": [1, 4], "labels": LABELS, "flips": True, "snapshots": (2, 3)}
    twins = vk.train_ensembles(model, points, PROCESS, ["J0", "J1"], **how)
    for twin, goal in zip(twins, ("J0", "J1"), strict=True):
        alone = vk.train_ensemble(model, points, PROCESS, objective=goal, **how)
        for a, b in ((twin, alone), (twin.snapshots[2], alone.snapshots[2])):
            for name in a.state:
                torch.testing.assert_close(a.state[name], b.state[name], rtol=1e-8, atol=1e-12)
        given = twin.given(2)
        torch.testing.assert_close(given.snapshots[3](points, 1.0), given(points, 1.0))
    whole, rest = (list(model.minibatches(training(model, 8, 8), [1, 4], (), done)) for done in (0, 2))
    assert all(torch.equal(a, b) for a, b in zip(whole[2], rest[0], strict=True))


def test_scores_have_no_dropout_and_the_loss_has():
    model = UNet(**TINY | {"dropout": 0.4})
    state, (z, e, y, w, key) = moved(model, 8, 8)
    one = {k: p[0] for k, p in state.items()}
    plain = UNet(**TINY)
    torch.testing.assert_close(model.function(one, z[0], e[0]), plain.function(one, z[0], e[0]))
    lossy = [float(model.loss(one, z[0], e[0], y[0], w[0], k)) for k in (key[0], key[1])]
    assert len({*lossy, float(plain.loss(one, z[0], e[0], y[0], w[0]))}) == 3


@pytest.mark.parametrize("bf16", [False, True])
def test_gradients_are_finite_and_those_of_plain_autograd(bf16):
    """All parts at once under vmap(grad) and as the CUDA graph takes them, one member by plain autograd."""
    model = UNet(**TINY | FULL | {"dtype": "float32", "bf16": bf16})
    state, draws = moved(model, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a missing batching rule warns
        slopes = vmap(grad(model.loss))(state, *draws)
    for m in range(2):
        own = {k: p[m].clone().requires_grad_() for k, p in state.items()}
        plain = torch.autograd.grad(model.loss(own, *(a[m] for a in draws)), list(own.values()))
        size = math.sqrt(sum(float(slope.square().sum()) for slope in plain))
        for name, slope in zip(own, plain, strict=True):
            assert slope.isfinite().all()
            assert float((slopes[name][m] - slope).norm()) < (2e-2 if bf16 else 1e-5) * size, name


# -------------------- classes and flips


def test_a_conditional_ensemble_learns_its_classes_and_survives_a_file(tmp_path):
    """Two constant images of two labels: each class is its image, which the other label's score does not return."""
    points = torch.stack([torch.full((4, 4), -0.8), torch.full((4, 4), 0.8), torch.full((4, 4), 0.8)])
    model = UNet((8, 16), classes=3, steps=60, batch=8, lr=1e-2, ema=0.9, chunk=None)
    ens = vk.train_ensemble(model, points, PROCESS, members=2, objective="J0", labels=[0, 2, 2], flips=True)
    x = torch.zeros(1, 4, 4)
    for label, value in ((0, -0.8), (2, 0.8)):
        one = ens.given(label)
        assert isinstance(one, vk.Scores)
        assert len(one) == 2
        assert torch.vmap(lambda x, one=one: one(x, 1.0))(x).shape == (1, 2, 4, 4)
        for member in (one[0], one[1:][0]):
            assert float((member.denoise(x, 3.0) - value).abs().mean()) < 0.5
    with pytest.raises(InputError, match=r"class-conditional: choose one of its 3 labels, ensemble.given\(label\)"):
        ens(x, 1.0)
    with pytest.raises(InputError, match=r"No training image had the label 1.*labels: \[0, 2\]"):
        ens.given(1)
    for bad in (3, -1, 0.5, True):
        with pytest.raises(InputError, match="label"):
            ens.given(bad)
    assert ens.info["data"] == {"name": None, "n": 3, "flips": True}
    for kept, name in ((ens, "all"), (ens.given(2), "one")):
        again = vk.load_ensemble(kept.save(tmp_path / name))
        assert torch.equal((again.given(2) if name == "all" else again)(x, 1.0), ens.given(2)(x, 1.0))
        with pytest.raises(InputError, match="No training image"):
            again.given(1)


def test_labels_act_through_the_embedding_alone():
    """A network whose label matrix is zero is one without classes."""
    model = UNet(**TINY | {"classes": 3})
    state, _ = moved(model, 8, 8)
    x, t = images(8, 8)[None], torch.linspace(0.1, 3, 5, dtype=torch.float64)[None]
    outs = [model.given(k).output(state, x, t, PROCESS) for k in range(3)]
    assert not torch.equal(outs[0], outs[1])
    state["label.weight"] = torch.zeros_like(state["label.weight"])
    plain = UNet(**TINY).output({k: p for k, p in state.items() if k != "label.weight"}, x, t, PROCESS)
    for k in range(3):
        torch.testing.assert_close(model.given(k).output(state, x, t, PROCESS), plain)


def test_a_spec_holds_everything():
    model = UNet(**TINY | FULL | {"label": 1})
    again = vk.models.from_spec(json.loads(json.dumps(model.spec)))
    assert repr(again) == repr(model)


# -------------------- refusals


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"channels": (8,)}, "two or more multiples of 8.*got \\(8,\\)"),
        ({"channels": (8, 12)}, "two or more multiples of 8"),
        ({"channels": 8}, "two or more multiples of 8"),
        ({"attention": (3,)}, r"attention must hold levels, 0 \(the full image\) to 2"),
        ({"attention": (-1,)}, "attention must hold levels"),
        ({"attention": (1, 1)}, "attention must hold levels"),
        ({"attention": 1}, "attention must hold levels"),
        ({"attention": (2,), "heads": 3}, "3 heads cannot share the 64 channels of level 2"),
        ({"heads": 0}, "heads must be a whole number"),
        ({"dropout": 1.0}, "dropout is a probability below 1"),
        ({"dropout": -0.1}, "dropout must be a finite number, 0 or more"),
        ({"dropout": math.nan}, "dropout must be a finite number"),
        ({"classes": 0}, "classes, the number of labels, must be a whole number"),
        ({"label": 1}, "There is no label 1: this U-Net has no labels: give classes=K"),
        ({"classes": 2, "label": 2}, "There is no label 2: this U-Net has labels 0 to 1"),
    ],
)
def test_bad_unets(options, says):
    with pytest.raises(InputError, match=says):
        UNet(**options)


def test_bad_trainings():
    points, few = images(8, 8), {"members": 1}
    features = vk.features.random_fourier(8, 64, process=PROCESS)
    with pytest.raises(InputError, match="with classes=3 is trained with labels"):
        vk.train_ensemble(UNet(classes=3), points, PROCESS, **few)
    with pytest.raises(InputError, match="There is no label 2 in a model with classes=2: 0 to 1"):
        vk.train_ensemble(UNet(classes=2), points, PROCESS, labels=LABELS, **few)
    for model in (UNet(), vk.models.MLP(), vk.models.Linear(features)):
        with pytest.raises(InputError, match="labels need a class-conditional model"):
            vk.train_ensemble(model, points, PROCESS, labels=LABELS, draws=100, **few)
    with pytest.raises(InputError, match="Only class-conditional models take a label"):
        vk.train_ensemble(UNet(**TINY), points, PROCESS, **few).given(0)
    with pytest.raises(InputError, match="more than one number in a group"):
        UNet((8, 8, 8))._module((4, 4))
