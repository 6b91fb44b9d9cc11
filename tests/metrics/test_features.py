"""Features of images: built-in ones, principal components, the user's own, refusals."""

from __future__ import annotations

import functools
import itertools

import draws
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.metrics.features import Extractor, extractor

DIGITS = vk.data.digits()


normal = functools.partial(draws.normal, dtype=torch.float32)


def images(data: vk.Empirical) -> Tensor:
    return data[:]


def test_pixels_and_standardised_pixels():
    x = normal(7, 1, 4, 5)
    assert torch.equal(extractor("pixels")(x), x.reshape(7, 20))
    z = extractor("standardised")(x)
    np.testing.assert_allclose(z.mean(1), 0, atol=1e-6)
    np.testing.assert_allclose(z.std(1, correction=0), 1, rtol=1e-5)
    np.testing.assert_allclose(extractor("standardised")(3 * x - 2), z, atol=1e-5)
    flat = extractor("standardised")(torch.full((3, 1, 4, 5), 0.1))
    assert torch.equal(flat, torch.zeros(3, 20))
    assert extractor("standardised")(normal(5, 1)).abs().max() == 0  # of one pixel nothing remains


@pytest.mark.parametrize("shape", [(60, 10), (12, 30)])  # more images than pixels, and fewer
def test_principal_components_are_those_of_the_singular_value_decomposition(shape):
    x = normal(*shape).double() * torch.linspace(3, 0.5, shape[1])
    extract = extractor("pca:4").fit(x)
    _, s, v = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    variances = s[:4].square() / (len(x) - 1)
    want = (x - x.mean(0)) @ v[:4].mT / variances.mean().sqrt()
    got = extract(x)
    np.testing.assert_allclose(got.abs(), want.abs(), atol=1e-8)
    assert float(got.var(0).sum()) == pytest.approx(4)
    rescaled = extractor("pca:4").fit(255 * x + 7)
    np.testing.assert_allclose(rescaled(255 * x + 7).abs(), got.abs(), atol=1e-7)


def test_components_beyond_the_rank_are_zero():
    x = torch.outer(torch.arange(12.0), torch.ones(20)).double()
    z = extractor("pca:3").fit(x)(x)
    assert float(z[:, 0].var()) == pytest.approx(3)
    np.testing.assert_allclose(z[:, 1:], 0, atol=1e-9)


def test_the_remainder_is_what_the_components_leave_out():
    x = normal(60, 10).double()
    extract = extractor("pca:4").fit(x)
    unit = 1 / float(extract.axes[:, 0].norm())
    both = (extract(x).square().sum(1) + extract.remainder()(x)[:, 0].square()).sqrt() * unit
    np.testing.assert_allclose(both, (x - x.mean(0)).norm(dim=1), rtol=1e-9)
    with pytest.raises(InputError, match="not fitted"):
        extractor("pixels").remainder()


def test_a_fit_follows_the_seed_and_takes_no_more_images_than_it_says(monkeypatch):
    monkeypatch.setattr("vkernel.metrics.features.FITTED", 100)
    one, same, other = (extractor("pca:3").fit(DIGITS, seed) for seed in (0, 0, 1))
    assert torch.equal(one.axes, same.axes)
    assert not torch.equal(one.center, other.center)


def test_features_over_a_memory_map_are_those_of_its_images(tmp_path, monkeypatch):
    stored = ((images(DIGITS)[:50] + 1) * 127).to(torch.uint8).numpy()
    np.save(tmp_path / "x.npy", stored)
    data = vk.load(tmp_path / "x.npy")
    assert not data.in_memory
    for spec in ("pixels", "standardised", "pca:5", "pca:5 of standardised"):
        extract = extractor(spec).fit(data)
        whole = extract(images(data))
        monkeypatch.setattr("vkernel.metrics.features.CALL", 500)
        np.testing.assert_allclose(extract.over(data), whole, atol=1e-6)
        np.testing.assert_allclose(extract.over(images(data)), whole, atol=1e-6)
        np.testing.assert_allclose(extract.over(data, torch.tensor([3, 1])), whole[[3, 1]], atol=1e-6)
        monkeypatch.undo()


def test_features_of_the_users_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def rows(x):\n    return x.mean(-1)\ndef array(x):\n    return x.sum((1, 2, 3)).numpy()\nn = 3\n")
    x = images(DIGITS)[:6]
    mine = extractor(f"{path}:rows")
    assert mine.custom
    assert torch.equal(mine(x), x.mean(-1).reshape(6, 8))
    assert extractor(f"{path}:array")(x).shape == (6, 1)
    assert extractor("torch:flatten").custom
    assert extractor(f"pca:2 of {path}:rows").fit(DIGITS)(x).shape == (6, 2)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Dropout())
    with pytest.raises(InputError, match="training mode"):
        extractor(net)
    assert extractor(net.eval())(x).shape == (6, 3)
    assert extractor(lambda a: a > 0)(x).dtype == torch.float32
    assert extractor(mine) is mine
    for spec, words in (
        (f"{path}:other", "has no 'other'"),
        (f"{path}:n", "is a int, not a function"),
        ("nowhere.at:all", "cannot be imported"),
        (f"{path}", "There are no features"),
        ("inception", "FACTORY@WEIGHTS.*nothing is downloaded"),
        ("pca:0", "written pca:32"),
        ("pca:x", "written pca:32"),
        ("pca:2 of pca:3", "principal components already"),
        (7, "named by a text or computed by a function, not int"),
    ):
        with pytest.raises(InputError, match=words):
            extractor(spec)


def test_a_network_of_an_installed_package_with_weights_on_this_machine(tmp_path, monkeypatch):
    package = tmp_path / "stub_net"
    package.mkdir()
    code = (
        "from torch import nn\ndef make(k=3):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, k), nn.Dropout())\n"
    )
    (package / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    net, x = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Dropout()).eval(), images(DIGITS)[:6]
    torch.save(net.state_dict(), tmp_path / "net.pt")
    for spec in (f"stub_net:make(k=5)@{tmp_path}/net.pt", f"{package}/__init__.py:make(5)@{tmp_path}/net.pt"):
        assert torch.equal(extractor(spec)(x), net(x))  # the dropout is off
    for spec, words in (
        (f"stub_net:make@{tmp_path}/net.pt", "shapes differ: 1.weight is 5×64, not 3×64"),
        (f"stub_net:make@{tmp_path}/none.pt", "There is no weight file"),
        (f"nowhere.at:all@{tmp_path}/net.pt", "cannot be imported"),
    ):
        with pytest.raises(InputError, match=words):
            extractor(spec)


def test_features_are_checked():
    x, sizes = normal(6, 3), itertools.count(1)
    for function, words in (
        (lambda a: a[:-1], "one row for each of 6 images"),
        (lambda a: a.sum(), "one row for each"),
        (lambda a: a / 0, "of 6 of 6 images are NaN or infinite"),
        (lambda a: a.to(torch.complex64), "real numbers"),
        (lambda a: "features", "failed on images of shape"),
        (lambda a: a @ a, "failed on images"),
    ):
        with pytest.raises(InputError, match=words):
            extractor(function)(x)
    changing = Extractor("changing", lambda a: torch.ones(len(a), next(sizes)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vkernel.metrics.features.CALL", 6)
        with pytest.raises(InputError, match="1 features for some images and 2 for others"):
            changing.over(x)
    with pytest.raises(InputError, match="not fitted"):
        extractor("pca:2")(x)
    with pytest.raises(InputError, match="6 images with 3 features have 3 at most"):
        extractor("pca:4").fit(x)
    with pytest.raises(InputError, match="fitted on 3 features, but these images have 2"):
        extractor("pca:2").fit(x)(x[:, :2])
    with pytest.raises(InputError, match="the same features"):
        extractor("pca:2").fit(torch.ones(6, 3))
    with pytest.raises(InputError, match="no images"):
        extractor("pixels").over(x[:0])
