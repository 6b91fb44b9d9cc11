"""Two processes give the posterior of one, and so do three (docs/theory.md, section 2.4).

Worlds of gloo processes answer every question that the parent, unsharded, answers too.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from draws import normal
from gpu_steps import TorchPath
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.posterior import Sharded

WORLDS = (2, 3)
LIMIT = 50  # seconds, after which a world hangs

Shard = Callable[..., vk.Empirical]


# --- the questions -------------------------------------------------------------------------------------------------


def ask(data: vk.Empirical, process: vk.Process, x: Tensor, t: float) -> dict[str, Tensor]:
    """Everything that may be asked of a score and its posterior."""
    score = vk.EmpiricalScore(data, process)
    post = score.posterior(x, t)
    cov, v, u = post.cov, torch.cos(1 + x), torch.sin(2 + x)
    weight, index = post.top(min(3, data.n))
    out = {"draw": cov.draw(generator=7), "third": post.third(v, u), "sample": post.sample(5, generator=8)}
    out |= {"indices": post.sample_indices(50, generator=9), "mean": post.mean, "logp": post.logp}
    out |= {"entropy": post.entropy, "ess": post.ess, "trace": cov.trace(), "diag": cov.diag(), "product": cov @ v}
    out |= {"top": weight, "weight": post.weight(torch.tensor(data.n - 1)), "last": post.weight(torch.tensor(-1))}
    out |= {"score": score(x, t), "denoise": score.denoise(x, t), "C": score.covariance(x, t) @ v}
    out |= {"s, C": score.with_covariance(x, t)[0], "points": data.take([0, data.n - 1, -1]), "rows": data.rows(0, 2)}
    out |= {"center": data.center, "spread": torch.tensor(data.spread), "weights": data.weights}
    out["top points"] = data.take(index.flatten()).reshape(*index.shape, data.d)  # points: twins may swap indices
    out["jvp"] = torch.func.jvp(lambda y: score(y, t), (x,), (v,))[1]
    out["vjp"] = torch.func.vjp(lambda y: score(y, t), x)[1](v)[0]
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad((score(leaf, t) * v).sum(), leaf, create_graph=True)
    out["second"] = torch.autograd.grad((first * u).sum(), leaf)[0]
    out["empty"] = score(x[:0], t)
    return out


def plane(shard: Shard, folder: Path) -> dict[str, Tensor]:
    data = shard(vk.Empirical(normal(37, 2, seed=0)))
    out = ask(data, vk.VP(), normal(4, 3, 2, seed=1), 0.2)
    score = vk.EmpiricalScore(data, vk.VP())
    out["ode"] = vk.sample.pf_ode(score, normal(6, 2, seed=2), spacing="uniform", steps=10, method="heun")
    out["sde"] = vk.sample.reverse_sde(score, normal(6, 2, seed=2), spacing="uniform", steps=5, generator=3)
    out["naive"] = vk.sample.naive(score, normal(6, 2, seed=2), spacing="uniform", kappa=0.1, steps=5, generator=3)
    out["jacobian"] = torch.func.vmap(torch.func.jacrev(lambda y: score(y, 0.3)))(normal(3, 2, seed=4))
    out["fraction"] = torch.tensor(float(vk.noise_fraction(data, vk.VP(), 0.1, queries=20, generator=5)))
    return out


def weighted(shard: Shard, folder: Path) -> dict[str, Tensor]:
    """Twins across the shards, and a first shard that weighs nothing."""
    points, weights = normal(23, 3, seed=0), normal(23, seed=1).exp()
    points[20], weights[:12] = points[13], 0.0
    return ask(shard(vk.Empirical(points, weights)), vk.EDM(), normal(5, 3, seed=2), 0.7)


def light(shard: Shard, folder: Path) -> dict[str, Tensor]:
    """The same in many dimensions, where few points are held as pairs."""
    weights = torch.tensor([0, 0, 0, 0, 0, 1, 2, 0, 3, 0.0])
    return ask(shard(vk.Empirical(normal(10, 40, seed=0), weights)), vk.VP(), normal(5, 40, seed=2), 0.1)


def collapsed(shard: Shard, folder: Path) -> dict[str, Tensor]:
    """So little noise that one point holds almost all the weight: covariances of 1e-20 are right too."""
    points = normal(30, 2, seed=0)
    x = points[[3, 17, 29]] + 0.02 * normal(3, 2, seed=1)
    return ask(shard(points), vk.EDM(), x, 0.03)


def few(shard: Shard, folder: Path) -> dict[str, Tensor]:
    """Fewer points than three processes."""
    return ask(shard(normal(2, 3, seed=0)), vk.VP(), normal(4, 3, seed=1), 0.3)


def single(shard: Shard, folder: Path) -> dict[str, Tensor]:
    return ask(shard(normal(1, 40, seed=0)), vk.VP(), normal(4, 40, seed=1), 0.3)


def images(shard: Shard, folder: Path) -> dict[str, Tensor]:
    """Bytes in a file, float32 on the way: the coarse product and its rungs."""
    pixels = np.load(folder / "images.npy", mmap_mode="r")
    out = ask(shard(pixels, scale=(-1, 1)), vk.VP(), normal(5, 1, 6, 6, seed=1), 0.2)
    view = vk.Empirical(pixels, scale=(-1, 1)).subset(torch.arange(0, 60, 2))
    clean = view[[0, 7, 29]]
    return out | {f"view {k}": a for k, a in ask(shard(view), vk.VP(), clean + 0.1, 0.03).items()}


def anisotropic(shard: Shard, folder: Path) -> dict[str, Tensor]:
    process = vk.Anisotropic(vk.VP(), torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64))
    return ask(shard(vk.Empirical(normal(11, 2, seed=0))), process, normal(4, 2, seed=1), 0.2)


def parts(shard: Shard, folder: Path) -> dict[str, Tensor]:
    """Every process brings its own points: of the last third, say, two ninths and one."""
    points, weights = normal(19, 2, seed=0), 1 + torch.arange(19.0)
    if not dist.is_initialized():
        return ask(vk.Empirical(points, weights), vk.VP(), normal(4, 2, seed=1), 0.2)
    ends = [0, 3, 19] if dist.get_world_size() == 2 else [0, 3, 4, 19]
    own = slice(ends[dist.get_rank()], ends[dist.get_rank() + 1])
    data = shard(vk.Empirical(points[own]), whole=False, weights=weights[own])
    return ask(data, vk.VP(), normal(4, 2, seed=1), 0.2)


def mixed(shard: Shard, folder: Path) -> dict[str, Tensor]:
    """Two ranks use the steps of the GPU path, the second of them keeps no weights for lack of memory."""
    score = vk.EmpiricalScore(shard(vk.Empirical(normal(200, 40, seed=0))), vk.EDM(), method="dense")
    rank = dist.get_rank() if dist.is_initialized() else None
    if rank in (0, 1):
        score.engine.gpu = TorchPath(score.engine.dense)
    if rank == 1:
        score.engine.memory = 8
    x = normal(5, 40, seed=1).double()
    fresh, post = score.posterior(x, 1.0), score.posterior(x, 1.0)
    return {"fresh": fresh.logp, "diag": post.cov.diag(), "logp": post.logp, "trace": post.cov.trace()}


SETS = {f.__name__: f for f in (plane, weighted, light, collapsed, few, single, images, anisotropic, parts, mixed)}


def refused(question: Callable[[], object]) -> str:
    with pytest.raises(InputError) as error:
        question()
    return str(error.value)


def refusals(rank: int) -> dict[str, str]:
    """What must be refused on every rank, with the sentence."""
    data = vk.posterior.shard(normal(8, 2, seed=0))
    score, x = vk.EmpiricalScore(data, vk.VP()), normal(3, 2, seed=1)
    lonely = vk.EmpiricalScore(vk.posterior.shard(normal(1, 2, seed=0)), vk.VP())
    other = x + (rank == 1)
    hole = normal(4, 2, seed=0)
    hole[2, 1] = torch.nan if rank == 1 else 0.0
    return {
        "x": refused(lambda: score(other, 0.2)),
        "t": refused(lambda: score(x, 0.2 + 0.1 * (rank == 1))),
        "number of queries": refused(lambda: score(x[: 2 + (rank == 1)], 0.2)),
        "nan on one rank": refused(lambda: score(x / (rank != 1), 0.2)),
        "nan": refused(lambda: score(x / 0, 0.2)),
        "v": refused(lambda: score.posterior(x, 0.2).cov @ other),
        "third": refused(lambda: score.posterior(x, 0.2).third(x, other)),
        "indices": refused(lambda: data.take([rank])),
        "no such point": refused(lambda: score.posterior(x, 0.2).weight(torch.tensor(8))),
        "derivative": refused(lambda: score.posterior(x, 0.2).cov @ x.clone().requires_grad_()),
        "third's derivative": refused(lambda: lonely.posterior(x, 0.2).third(x, x.clone().requires_grad_())),
        "ragged": refused(lambda: vk.posterior.shard([[1.0], [2.0, 3.0]])),
        "twice": refused(lambda: vk.posterior.shard(data)),
        "subset": refused(lambda: data.subset([0])),
        "merged": refused(lambda: vk.profile(data)),
        "another set": refused(lambda: vk.posterior.shard(normal(8, 2, seed=rank))),
        "sizes": refused(lambda: vk.posterior.shard(normal(8 + rank, 2, seed=0))),
        "hole": refused(lambda: vk.posterior.shard(hole, whole=False)),
        "parts with weights": refused(lambda: vk.posterior.shard(vk.Empirical([0.0, 1.0], [1, 2]), whole=False)),
        "weights": refused(lambda: vk.posterior.shard(x, weights=[1, 2])),
        "negative": refused(lambda: vk.posterior.shard(x, weights=[1, 2, -1])),
        "zero": refused(lambda: vk.posterior.shard(x, weights=[0, 0, 0])),
        "scale": refused(lambda: vk.posterior.shard(vk.Empirical(x), scale=(0, 1))),
        "mesh": refused(lambda: vk.posterior.shard(x, "cpu")),
        "no points": refused(lambda: vk.posterior.shard(x[:0])),
    }


def meshes(world: int) -> dict[str, Tensor]:
    """A mesh, a group and nothing are three names for the same; a group may be smaller than the world."""
    from torch.distributed.device_mesh import init_device_mesh

    points, x = normal(7, 2, seed=0), normal(3, 2, seed=1)
    groups = {"mesh": init_device_mesh("cpu", (world,)), "group": dist.new_group(), "none": None}
    out = {k: vk.EmpiricalScore(vk.posterior.shard(points, g), vk.VP())(x, 0.2) for k, g in groups.items()}
    last = dist.new_group([world - 1])
    if dist.get_rank() == world - 1:
        data = vk.posterior.shard(points, last)
        assert data.own.n == data.n == 7
        assert torch.equal(vk.EmpiricalScore(data, vk.VP())(x, 0.2), vk.EmpiricalScore(points, vk.VP())(x, 0.2))
    else:
        assert "mesh must be" in refused(lambda: vk.posterior.shard(points, last))
    wide = init_device_mesh("cpu", (1, world))
    assert "one-dimensional" in refused(lambda: vk.posterior.shard(points, wide))
    return out


def holdings(rank: int, world: int, folder: Path) -> None:
    """A rank holds its own rows and no others; draws without a seed are the same for all."""
    data = vk.posterior.shard(np.load(folder / "images.npy", mmap_mode="r"))
    assert data.own.n == len(data.own._store) == 60 * (rank + 1) // world - 60 * rank // world
    assert not data.in_memory
    assert data.first == 60 * rank // world
    assert f"rank {rank} of {world}" in repr(data)
    kept = vk.posterior.shard(torch.zeros(30, 5) + torch.arange(30.0)[:, None])
    assert kept.own._store.untyped_storage().nbytes() == kept.own._store.nbytes
    assert torch.equal(kept.own.rows(0, 1)[0, :1].long(), torch.tensor([kept.first]))
    assert kept.to("cpu").own.n == kept.own.n
    assert data.ranks.sharing == world
    post = vk.EmpiricalScore(kept, vk.VP()).posterior(torch.zeros(4, 5), 0.9)
    for draw in (post.sample(3), post.cov.draw()):
        assert all(torch.equal(draw, other) for other in data.ranks.gather(draw))


def work(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    here = Path(folder)
    store = dist.FileStore(str(here / f"store{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=LIMIT / 2))
    answers = {name: question(vk.posterior.shard, here) for name, question in SETS.items()}
    holdings(rank, world, here)
    torch.save((answers, meshes(world), refusals(rank)), here / f"{world}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


# --- the answers ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharded")
    np.save(path / "images.npy", np.random.default_rng(0).integers(0, 256, (60, 1, 6, 6), dtype=np.uint8))
    return path


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest, folder: Path) -> list[tuple[dict, dict, dict]]:
    """What every rank of a world answered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        # a server reads the packages once and forks, before any thread begins; spawned processes would each read them
        multiprocessing.get_context("forkserver").set_forkserver_preload([__name__, "torch._dynamo"])
        how = {"nprocs": request.param, "join": False, "start_method": "forkserver"}
        context = mp.start_processes(work, (request.param, str(folder)), **how)
    deadline = time.monotonic() + LIMIT
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, "the processes hang"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"{request.param}-{rank}.pt") for rank in range(request.param)]


def whole(data: object, *, scale: object = None) -> vk.Empirical:
    return data if isinstance(data, vk.Empirical) else vk.Empirical(data, scale=scale)


@pytest.mark.parametrize("name", SETS)
def test_many_processes_give_the_posterior_of_one(world: list, folder: Path, name: str) -> None:
    expected = SETS[name](whole, folder)
    exact = name not in (
        "images",
        "light",
        "mixed",
    )  # there the coarse product is float32, and shards drop other points
    got = world[0][0][name]
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        close = (
            {"rtol": 1e-9, "atol": 1e-11} if exact and value.dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
        )
        torch.testing.assert_close(got[key], value, **close, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", SETS)
def test_every_rank_gets_the_same_bits(world: list, name: str) -> None:
    for other in world[1:]:
        assert all(torch.equal(a, other[0][name][key]) for key, a in world[0][0][name].items())


def test_small_covariances_keep_their_relative_accuracy(world: list, folder: Path) -> None:
    expected, got = collapsed(whole, folder), world[0][0]["collapsed"]
    assert expected["trace"].min() < 1e-10
    for key in ("trace", "diag", "product"):
        torch.testing.assert_close(got[key], expected[key], rtol=1e-9, atol=0.0)


def test_a_mesh_a_group_and_the_default_group_agree(world: list) -> None:
    for answers in world:
        assert torch.equal(answers[1]["mesh"], answers[1]["group"])
        assert torch.equal(answers[1]["mesh"], answers[1]["none"])


SENTENCES = {
    "x": "queries x and t must be the same on all ranks.*those of rank 1 are not",
    "t": "queries x and t must be the same",
    "number of queries": "queries x and t must be the same",
    "nan on one rank": "queries x and t must be the same",
    "nan": "NaN or infinite",
    "v": "The vectors must be the same",
    "third": "The vectors must be the same",
    "indices": "indices of points must be the same",
    "no such point": "no point 8",
    "derivative": "detach",
    "third's derivative": "detach",
    "ragged": "this list forms none",
    "twice": "sharded already",
    "subset": "no subsets",
    "merged": "merge them first",
    "another set": "whole=False.*values of points",
    "sizes": "number of points",
    "hole": "On rank 1.*Training point 2 is not finite",
    "parts with weights": "one common scale",
    "weights": "one weight for each of 3",
    "negative": "not negative",
    "zero": "Every weight is zero",
    "scale": "its own scale",
    "mesh": "mesh must be a DeviceMesh",
    "no points": "at least one training point",
}


@pytest.mark.parametrize("case", SENTENCES)
def test_all_ranks_refuse_with_a_sentence(world: list, case: str) -> None:
    for _, _, sentences in world:
        assert re.search(SENTENCES[case], sentences[case]), sentences[case]


def test_sharding_needs_processes() -> None:
    with pytest.raises(InputError, match="torchrun"):
        vk.posterior.shard(torch.zeros(3, 2))
    assert issubclass(Sharded, vk.Empirical)


def test_the_script_of_the_how_to_runs_under_torchrun(folder: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "howto" / "many_devices.md"
    script = re.search(r"^```py\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert script is not None
    (folder / "score.py").write_text(script[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "score.py"]
    source = str(Path(vk.__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": source}
    run = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert run.returncode == 0, run.stderr
    process, data = vk.VP(), vk.Empirical(np.load(folder / "images.npy"), scale=(-1, 1))
    x = vk.sample.pf_ode(
        vk.EmpiricalScore(data, process),
        process.prior((16, *data.shape), generator=0),
        steps=50,
    )
    torch.testing.assert_close(torch.load(folder / "samples.pt"), x, rtol=1e-3, atol=1e-3)
