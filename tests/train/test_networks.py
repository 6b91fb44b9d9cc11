"""Networks: all members at once are the members one by one; what is learnt; what is refused."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import vkernel as vk
from vkernel.core import rng
from vkernel.core.errors import InputError
from vkernel.train.models import network
from vkernel.train.models.base import time_input
from vkernel.train.models.mlp import ACTIVATIONS, MLP
from vkernel.train.models.unet import UNet
from vkernel.train.objectives import J0, J1, VARIES, Training

PROCESS = vk.VP(eps=0.01)
POINTS = torch.tensor([[-1.0, 0.0], [1.0, 0.5], [0.2, 1.0]], dtype=torch.float64)
SMALL = {"width": 8, "depth": 2, "steps": 20, "batch": 8, "dtype": "float64", "lr": 1e-2}


def quiet(share: float) -> None:
    pass


def training(draws: int | None = 40, objective=None, points: Tensor = POINTS, vary=VARIES, process=PROCESS) -> Training:
    return Training(vk.Empirical(points), process, objective or J1(), draws, vary=vary, seed=3)


def images(*shape: int) -> Tensor:
    return torch.randn(4, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).clamp(-1, 1)


def queries(count: int, *shape: int, members: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(members, count, *shape, generator=g, dtype=torch.float64)
    return x, 0.01 + 0.99 * torch.rand(members, count, generator=g, dtype=torch.float64)


def close(a: dict[str, Tensor], b: dict[str, Tensor], rtol: float, atol: float = 1e-13) -> None:
    assert list(a) == list(b)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=atol)


# -------------------- at once, or one by one


@pytest.mark.parametrize("objective", [J1(), J0()], ids=repr)
@pytest.mark.parametrize("draws", [40, None])
@pytest.mark.parametrize(
    "options", [{}, {"optimiser": "sgd"}, {"ema": 0.9}, {"decay": "cosine", "target": "x0"}], ids=str
)
def test_all_at_once_is_one_by_one(options, draws, objective):
    model, told = MLP(**SMALL | options), training(draws, objective)
    together = model.fit(told, [0, 1, 2], quiet)
    for m in range(3):
        close(model.fit(told, [m], quiet), {name: p[m : m + 1] for name, p in together.items()}, 1e-9)


def test_blocks_of_members_and_of_draws_change_nothing(monkeypatch):
    for draws in (40, None):
        whole = MLP(**SMALL).fit(training(draws), range(5), quiet)
        with monkeypatch.context() as patch:
            patch.setitem(network.DRAWN, "cpu", 7 * 2 * 2)
            close(MLP(**SMALL, chunk=2).fit(training(draws), range(5), quiet), whole, 1e-9)


def by_hand(model: MLP, told: Training, member: int) -> list[Tensor]:
    """One member by a plain loop of torch, from the formulas of the module."""
    start = list(model.initial(told, [member]).values())
    sizes = [p.shape[2] for p in start[::2]] + [start[-1].shape[1]]
    layers = []
    for k, (a, b) in enumerate(pairwise(sizes)):
        layer = nn.Linear(a, b, dtype=torch.float64)
        layer.weight.data, layer.bias.data = start[2 * k][0].clone(), start[2 * k + 1][0].clone()
        layers += [layer, nn.Tanh()]
    net = nn.Sequential(*layers[:-1])
    kinds = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    optimiser = kinds[model.optimiser](net.parameters(), lr=model.lr)
    summed, mass = [torch.zeros_like(p) for p in net.parameters()], 0.0
    for k in range(model.steps):
        x, t, m = draws_by_hand(model, told, member, k)
        alpha, sigma = PROCESS.alpha(t)[:, None], PROCESS.sigma(t)[:, None]
        u = time_input(t, PROCESS)[:, None]
        waves = [f(math.pi * j * u) for f in (torch.sin, torch.cos) for j in range(1, model.time_features + 1)]
        size = (4 * alpha**2 + sigma**2).sqrt()
        f = net(torch.cat([x / size, u, *waves], 1))
        score = (alpha * f - x) / sigma**2 if model.target == "x0" else -f / sigma
        loss = (sigma**2 * (score - (alpha * m - x) / sigma**2).square()).sum() / (2 * len(x))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        decay = model.ema or 0.0
        summed = [decay * a + p.detach() for a, p in zip(summed, net.parameters(), strict=True)]
        mass = decay * mass + 1
    return [a / mass for a in summed]


def draws_by_hand(model: MLP, told: Training, member: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    P, B = told.draws, model.batch
    if P is None:
        batch, chosen = told.batch([member], B, B * step), torch.arange(B)
    else:
        batch, epoch = told.batch([member], P), step // (P // B)
        order = rng.uniforms(told.keys("order", [member]), epoch * P + torch.arange(P)).argsort()
        chosen = order[step % (P // B) * B :][:B]
    return batch.x[0, chosen], batch.t[0, chosen], batch.m[0, chosen]


@pytest.mark.parametrize("draws", [27, None])
@pytest.mark.parametrize("target", ["noise", "x0"])
@pytest.mark.parametrize("options", [{}, {"optimiser": "sgd", "lr": 1e-5}, {"ema": 0.8}], ids=str)
def test_the_same_as_a_plain_loop(options, target, draws):
    model, told = MLP(**SMALL | {"activation": "tanh", "target": target, "spread": 2.0} | options), training(draws)
    state = model.fit(told, [4, 7], quiet)
    for row, member in enumerate((4, 7)):
        for p, want in zip(state.values(), by_hand(model, told, member), strict=True):
            torch.testing.assert_close(p[row], want, rtol=1e-9, atol=1e-13)


def test_an_epoch_takes_every_draw_at_most_once_and_epochs_differ():
    model, told = MLP(**SMALL | {"batch": 12, "steps": 6}), training(40)
    seen = torch.stack([y for _, _, y, _ in model.minibatches(told, [0, 1])])  # (step, M, B, d)
    first, second = (seen[i : i + 3].transpose(0, 1).flatten(1, 2) for i in (0, 3))
    for member in range(2):
        assert len(first[member].unique(dim=0)) == len(second[member].unique(dim=0)) == 36
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])


# -------------------- initial parameters


def test_same_init_and_different_init():
    model = MLP(**SMALL)
    same = model.initial(training(vary=("inputs", "targets", "order")), [0, 1, 2])
    other = model.initial(training(), [0, 1, 2])
    for name in same:
        assert torch.equal(same[name][0], same[name][2])
        if name.endswith("weight"):
            assert not torch.equal(other[name][0], other[name][2])
    close({n: p[:1] for n, p in same.items()}, {n: p[:1] for n, p in other.items()}, 0)
    after = model.fit(training(vary=("inputs", "targets", "order")), [0, 1], quiet)
    assert not torch.equal(after["layers.0.weight"][0], after["layers.0.weight"][1])


def test_initial_law_and_dtype():
    wide = MLP(width=400, depth=2, dtype="float64").initial(training(), [0, 1])
    assert float(wide["layers.1.weight"].std()) == pytest.approx((2 / 400) ** 0.5, rel=0.01)
    assert float(wide["layers.2.weight"].std()) == pytest.approx((1 / 400) ** 0.5, rel=0.1)
    assert float(wide["layers.1.bias"].abs().max()) == 0
    single = MLP(width=400, depth=2).initial(training(), [0, 1])
    close(single, {name: p.float() for name, p in wide.items()}, 0)


def test_global_generator_is_left_alone():
    before = torch.get_rng_state()
    MLP(**SMALL).fit(training(), [0], quiet)
    UNet((8, 8, 8)).initial(training(points=images(8, 8)), [0])
    assert torch.equal(before, torch.get_rng_state())


# -------------------- members that diverge


class Poisoned(MLP):
    """Member 1 begins with numbers that overflow."""

    def initial(self, training: Training, members):
        state = super().initial(training, members)
        for p in state.values():
            p[list(members).index(1)] *= 1e30
        return state


@pytest.mark.parametrize("options", [{}, {"ema": 0.9}, {"optimiser": "sgd"}], ids=str)
def test_a_member_that_diverges_leaves_the_others_alone(options):
    args = SMALL | {"dtype": "float32"} | options
    healthy, sick = (kind(**args).fit(training(), [0, 1, 2], quiet) for kind in (MLP, Poisoned))
    assert not all(p[1].isfinite().all() for p in sick.values())
    for name in sick:
        assert torch.equal(sick[name][[0, 2]], healthy[name][[0, 2]])
        assert sick[name][[0, 2]].isfinite().all()
    x, t = queries(5, 2)
    both = [MLP(**args).output(state, x, t, PROCESS) for state in (healthy, sick)]
    assert torch.equal(both[0][[0, 2]], both[1][[0, 2]])


def test_too_large_a_step_is_not_an_error():
    state = MLP(**SMALL | {"optimiser": "sgd", "lr": 1e6}).fit(training(), [0, 1], quiet)
    assert not any(p.isfinite().all() for p in state.values())


# -------------------- what is learnt


def test_full_batch_descent_goes_down_all_the_way():
    told, losses = training(60), []
    for steps in (1, 20, 40, 60, 80):
        model = MLP(16, 2, optimiser="sgd", lr=0.02, batch=None, steps=steps, dtype="float64")
        state, (pool,) = model.fit(told, [0, 1], quiet), {id(b): b for b in model.minibatches(told, [0, 1])}.values()
        losses.append(torch.func.vmap(model.loss)(state, *pool))
    assert (torch.stack(losses).diff(dim=0) < 0).all()


def test_one_step_of_descent_follows_the_theorys_loss():
    told, lr = training(30), 1e-7
    model = MLP(16, 2, target="score", weight="one", optimiser="sgd", lr=lr, batch=None, steps=1, dtype="float64")
    before, after = model.initial(told, [0]), model.fit(told, [0], quiet)
    batch = told.batch([0], 30)
    true = (PROCESS.alpha(batch.t)[..., None] * batch.m - batch.x) / PROCESS.S(batch.t)[..., None]

    def loss(state: dict[str, Tensor]) -> float:
        return float((model.score(state, batch.x, batch.t, PROCESS) - true).square().sum()) / (2 * 30)

    slope = sum(((after[n] - before[n]) / lr).square().sum() for n in before)  # dL/dτ = -|∇L|²
    assert (loss(before) - loss(after)) / lr == pytest.approx(float(slope), rel=1e-2)


@pytest.mark.parametrize(("target", "runs"), [("noise", (300, 1200, 3000)), ("x0", (300, 1200))])
def test_one_point_is_learnt(target, runs):
    """The error of the noise, whose size is 1, goes to 0: longer training makes it smaller, again and again."""
    told = training(None, points=torch.tensor([[0.7, -0.4]], dtype=torch.float64))
    batch, errors = told.batch([0], 2000, start=10**6), []
    sigma = PROCESS.sigma(batch.t)[..., None]
    want = (PROCESS.alpha(batch.t)[..., None] * batch.m - batch.x) / sigma.square()
    for steps in runs:
        model = MLP(32, 2, target=target, lr=5e-3, steps=steps, ema=0.98, decay="cosine")
        got = model.score(model.fit(told, [0, 1], quiet), batch.x, batch.t, PROCESS)
        errors.append((sigma * (got - want)).square().mean((1, 2)).sqrt())
    assert (torch.stack(errors)[1:] < torch.stack(errors)[:-1] / 1.5).all()
    assert errors[-1].max() < 0.06  # what is left is at small sigma, which uniform times seldom show


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_learns(activation):
    told = training(64, J0())
    model = MLP(16, 2, activation=activation, lr=1e-2, steps=60, batch=32)
    pool = model.pool(told, [0, 1], 64)
    loss = torch.func.vmap(model.loss)
    assert (loss(model.fit(told, [0, 1], quiet), *pool) < 0.5 * loss(model.initial(told, [0, 1]), *pool)).all()


# -------------------- asking for output


@pytest.mark.parametrize(
    "process", [PROCESS, vk.EDM(), vk.FlowMatching(), vk.VE(eps=0.01)], ids=lambda p: type(p).__name__
)
def test_time_input_runs_from_minus_one_to_one(process):
    u = time_input(torch.tensor([process.eps, process.T], dtype=torch.float64), process)
    torch.testing.assert_close(u, torch.tensor([-1.0, 1.0], dtype=torch.float64))
    inside = time_input(torch.linspace(process.eps, process.T, 50), process)
    assert (inside.diff() > 0).all()


@pytest.mark.parametrize("chunk", [None, 2])
def test_output_shared_own_and_in_pieces(chunk, monkeypatch):
    points = POINTS.repeat(1, 3).reshape(3, 3, 2)
    model = MLP(**SMALL | {"chunk": chunk})
    state = model.fit(training(points=points), [0, 1, 2], quiet)
    x, t = queries(11, 3, 2)
    shared = model.output(state, x, t, PROCESS)
    assert shared.shape == (3, 11, 3, 2)
    own = (x.expand(3, -1, -1, -1), t.expand(3, -1))
    for a, b in ((own[0], t), (x, own[1]), own):
        torch.testing.assert_close(model.output(state, a, b, PROCESS), shared)
    module = model.module((3, 2)).double()
    for m in range(3):
        module.load_state_dict({name: p[m] for name, p in state.items()})
        z, e = model.inputs(x, t, PROCESS)
        torch.testing.assert_close(module(z[0], e[0]).detach(), shared[m])
    monkeypatch.setattr(network, "HELD", 50)
    torch.testing.assert_close(model.output(state, x, t, PROCESS), shared)
    assert model.output(state, x.float(), t.float(), PROCESS).dtype == torch.float32


def test_output_is_differentiable_in_x():
    model = MLP(**SMALL)
    state = model.fit(training(), [0, 1], quiet)
    x, t = queries(4, 2)
    assert not model.output(state, x, t, PROCESS).requires_grad
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: model.score(state, x, t, PROCESS), (x,))


def test_progress_adds_up_to_one():
    for chunk, steps in ((None, 7), (2, 250)):
        shares: list[float] = []
        MLP(**SMALL | {"steps": steps, "chunk": chunk, "batch": 2}).fit(training(4), range(3), shares.append)
        assert sum(shares) == pytest.approx(1)
        assert len(shares) <= 260


@pytest.mark.parametrize("model", [MLP(8, 2, ema=0.9, batch=None, dtype=torch.float64), UNet((8, 16, 16), bf16=True)])
def test_spec_makes_the_model_again(model):
    spec = json.loads(json.dumps(model.spec))
    assert spec.pop("kind") == type(model).__name__.lower()
    again = type(model)(**spec)
    assert again.spec == model.spec
    assert again.dtype == model.dtype
    assert repr(again) == repr(model)


# -------------------- U-Net

TINY = {"channels": (8, 8, 16), "steps": 2, "batch": 4, "ema": None}


@pytest.mark.parametrize("shape", [(28, 28), (1, 32, 32), (3, 32, 32), (4, 8, 12)])
def test_unet_shapes(shape):
    model, told = UNet(**TINY | {"steps": 3}), training(None, points=images(*shape))
    state = model.fit(told, [0, 1], quiet)
    x, t = queries(3, *shape)
    out = model.output(state, x, t, PROCESS)
    assert out.shape == (2, 3, *shape)
    assert out.dtype == torch.float64
    assert out.isfinite().all()
    assert out[0].abs().max() > 0
    assert not torch.equal(out[0], out[1])


@pytest.mark.parametrize("draws", [6, None])
def test_unet_at_once_is_one_by_one(draws):
    told = training(draws, points=images(1, 8, 8))
    found = [
        UNet(**TINY | {"steps": 3, "dtype": "float64"}, chunk=chunk).fit(told, [0, 1, 2], quiet) for chunk in (1, 3)
    ]
    close(*found, 1e-8, 1e-10)  # gradients of biases before a normalisation are rounding, which Adam magnifies
    x, t = queries(5, 1, 8, 8)
    out = [UNet(**TINY, dtype="float64", chunk=chunk).output(found[0], x, t, PROCESS) for chunk in (1, 3)]
    torch.testing.assert_close(*out, rtol=1e-9, atol=1e-12)


def test_unet_member_that_diverges_leaves_the_others_alone(monkeypatch):
    model, told = UNet(**TINY, chunk=3), training(6, points=images(8, 8))
    start = model.initial(told, [0, 1, 2])
    healthy = model.fit(told, [0, 1, 2], quiet)
    start["first.weight"][1, 0] = math.inf
    monkeypatch.setattr(model, "initial", lambda told, members: start)
    sick = model.fit(told, [0, 1, 2], quiet)
    assert not sick["last.weight"][1].isfinite().all()
    assert all(torch.equal(sick[name][[0, 2]], healthy[name][[0, 2]]) for name in sick)


@pytest.mark.parametrize("chunk", [1, 2])
def test_unet_in_bf16_is_close(chunk):
    told = training(8, points=images(1, 8, 8))
    x, t = queries(16, 1, 8, 8)
    out = []
    for bf16 in (False, True):
        model = UNet(**TINY | {"steps": 10, "lr": 1e-3}, bf16=bf16, chunk=chunk)
        state = model.fit(told, [0, 1], quiet)
        assert all(p.dtype == torch.float32 for p in state.values())
        out.append(model.output(state, x, t, PROCESS))
    assert not torch.equal(*out)
    assert float((out[0] - out[1]).norm() / out[0].norm()) < 0.15


def test_unet_starts_at_zero_and_has_half_a_million_parameters():
    model = UNet()
    state = model.initial(training(points=images(28, 28)), [0])
    assert sum(p.numel() for p in state.values()) == 491_169
    assert float(model.output(state, *queries(2, 28, 28), PROCESS).abs().max()) == 0


def test_unet_learns():
    told = training(16, J0(), points=images(8, 8))
    model = UNet((8, 16, 16), lr=5e-3, batch=8, steps=60, ema=None)
    pool, loss = model.pool(told, [0], 16), torch.func.vmap(model.loss)
    assert float(loss(model.fit(told, [0], quiet), *pool)) < 0.5 * float(loss(model.initial(told, [0]), *pool))


# -------------------- refusals


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": 0}, "steps must be a whole number, 1 or more, not 0"),
        ({"ema": 1.0}, "ema, the decay of the average, must be a number between 0 and 1"),
        ({"ema": True}, "ema"),
        ({"activation": "step"}, "activation must be one of silu.* not 'step'"),
        ({"batch": 0}, "batch must be a whole number"),
        ({"lr": -1.0}, "lr must be positive and finite"),
        ({"lr": math.nan}, "lr must be positive and finite"),
        ({"width": 2.5}, "width must be a whole number"),
        ({"optimiser": "lion"}, "optimiser must be one of adam, sgd"),
        ({"decay": "step"}, "decay of lr must be"),
        ({"dtype": "float16"}, "dtype must be one of float32, float64"),
        ({"target": "velocity"}, "target is one of"),
    ],
)
def test_bad_arguments(options, says):
    with pytest.raises(InputError, match=says):
        MLP(**options)


def test_bad_training():
    with pytest.raises(InputError, match="A batch of 64 draws needs as many, but draws=10"):
        MLP().fit(training(10), [0], quiet)
    with pytest.raises(InputError, match="batch=None takes all draws in every step"):
        MLP(batch=None).fit(training(None), [0], quiet)


@pytest.mark.parametrize("shape", [(30, 28), (3, 32, 30), (5, 8, 8), (16,), (2, 2)])
def test_bad_images(shape):
    with pytest.raises(InputError, match="A U-Net"):
        UNet().fit(training(None, points=images(*shape)), [0], quiet)


def test_bad_unets():
    with pytest.raises(InputError, match="two or more multiples of 8"):
        UNet((8, 12, 16))
    with pytest.raises(InputError, match="blocks"):
        UNet(blocks=0)
    with pytest.raises(InputError, match="bf16"):
        UNet(bf16=True, dtype="float64")


# -------------------- GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_the_same_on_a_gpu():
    for model, points in ((MLP(**SMALL), POINTS), (UNet(**TINY | {"dtype": "float64"}, chunk=None), images(1, 8, 8))):
        here = model.fit(training(points=points), [0, 1], quiet)
        data = vk.Empirical(points).to("cuda")
        there = model.fit(Training(data, PROCESS, J1(), 40, seed=3), [0, 1], quiet)
        assert all(p.is_cuda for p in there.values())
        close(here, {name: p.cpu() for name, p in there.items()}, 1e-6, 1e-8)
