"""Between two images: C on the line against brute force, its text, and the ends of runs."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from exhibits import Made, brute_force, says, without_pictures

import vkernel as vk
from vkernel import plots
from vkernel.core.errors import InputError
from vkernel.reproduce import images
from vkernel.reproduce.exhibit import Run, Skip


@pytest.fixture
def line(made: Made) -> dict[str, np.ndarray]:
    return made.arrays["digits_line"]


def digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    return load_digits().images.reshape(-1, 64) / 8 - 1, load_digits().target


def test_the_pair_is_the_nearest_of_different_class(line: dict[str, np.ndarray]) -> None:
    y, labels = digits()
    square = (y**2).sum(1)[:, None] + (y**2).sum(1) - 2 * y @ y.T
    square[labels[:, None] == labels] = np.inf
    a, b = line["pair"]
    assert labels[a] != labels[b]
    assert line["pair_distance"] ** 2 == pytest.approx(square.min())
    assert line["pair_distance"] == pytest.approx(np.linalg.norm(y[a] - y[b]))


def test_the_line_against_brute_force(line: dict[str, np.ndarray]) -> None:
    y, _ = digits()
    a, b = y[line["pair"]]
    for i, t in enumerate(line["t"]):
        alpha, var = (float(f(torch.tensor(t))) for f in (vk.VP().alpha, vk.VP().S))
        for j in range(0, len(line["lam_clean"]), 5):
            lam = line["lam_clean"][j]
            trace, _ = brute_force(y, alpha * ((1 - lam) * a + lam * b), alpha, var)
            assert line["clean"][i, j] == pytest.approx(trace * var / 64, rel=1e-4, abs=1e-12)


def test_with_noise_the_ends_are_as_noisy_as_the_set(line: dict[str, np.ndarray]) -> None:
    """At t where all points compete, what a draw shows and what the set shows on average agree."""
    assert np.isfinite(line["noisy"]).all()
    assert (line["noisy"] >= 0).all()
    k = int(np.argmin(abs(line["t"] - 0.5)))
    assert line["noisy"][k].mean() == pytest.approx(line["rho"][k], rel=0.3)
    assert line["chosen_t"] == line["t"][line["rho"].argmax()]


def test_the_number_is_what_its_words_say(line: dict[str, np.ndarray]) -> None:
    _, labels = digits()
    pairs, ratios = line["ratio_pairs"], line["ratio_at_chosen"]
    assert len(np.unique(pairs)) == pairs.size  # no image twice
    assert (labels[pairs[:, 0]] != labels[pairs[:, 1]]).all()
    logs = np.log(ratios)
    value, low, high = line["ratio"]
    assert value == pytest.approx(math.exp(logs.mean()))
    se = logs.std(ddof=1) / math.sqrt(len(logs))
    assert math.log(high / value) == pytest.approx(2.093 * se, rel=1e-3)  # Student's quantile for 20 pairs
    assert math.log(value / low) == pytest.approx(2.093 * se, rel=1e-3)
    k = list(line["ratio_t"]).index(line["chosen_t"])
    np.testing.assert_allclose(line["ratio_noisy"][:, k], line["ratio"])


def test_the_bare_ratio_against_brute_force(line: dict[str, np.ndarray]) -> None:
    y, _ = digits()
    k = list(line["ratio_t"]).index(line["chosen_t"])
    alpha, var = (float(f(torch.tensor(float(line["chosen_t"])))) for f in (vk.VP().alpha, vk.VP().S))
    logs = []
    for a, b in line["ratio_pairs"]:
        ends = [brute_force(y, alpha * y[i], alpha, var)[0] for i in (a, b)]
        logs.append(math.log(brute_force(y, alpha * (y[a] + y[b]) / 2, alpha, var)[0] / np.mean(ends)))
    assert line["ratio_clean"][0, k] == pytest.approx(math.exp(np.mean(logs)), rel=1e-4)


def test_the_jackknife_takes_out_the_bias_of_the_logarithm() -> None:
    g = torch.Generator().manual_seed(0)
    draws = -torch.rand((4, 3, 40_000), generator=g, dtype=torch.float64).log()  # exponential, mean 1: log ratio 0
    plain = images.log_ratio(draws.mean(0, keepdim=True)).mean()
    assert abs(plain) > 0.05
    assert abs(images.log_ratio(draws).mean()) < abs(plain) / 3
    assert images.log_ratio(torch.zeros(1, 3, 2)).isnan().all()


@pytest.mark.parametrize(
    ("ratio", "words"), [([2, 1.5, 2.5], "above 1"), ([0.5, 0.4, 0.6], "below 1"), ([1, 0.9, 1.1], "holds 1")]
)
def test_the_verdict_follows_the_interval(ratio: list[float], words: str) -> None:
    values = {"s": SimpleNamespace(kind="digits"), "ratio": ratio, "bare": ratio, "chosen_t": 0.2}
    values["ratio_at_chosen"] = [1.0] * 20
    found = says("line", "finding.words", **values, rho=torch.tensor([0.1]), rho_se=torch.tensor([0.01]))
    assert f"The interval {'lies ' if words != 'holds 1' else ''}{words}" in found


def test_cifar_is_made_where_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = os.environ.get("VKERNEL_DATA", "")
    if not (root and (Path(root) / "cifar10").is_dir()):
        pytest.skip("VKERNEL_DATA names no folder with cifar10/")
    without_pictures(monkeypatch)
    exhibit = images.cifar_line(Run(tmp_path, 0, True, lambda share: None))
    saved = np.load(tmp_path / exhibit.data)
    assert saved["clean"].shape == (7, 13)
    assert np.isfinite(saved["ratio"]).all()


@pytest.mark.parametrize("labels", [None, "[1, 2]", '{"0": [1, 2]}', '{"zero": [1]}'])
def test_cifar_is_skipped_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labels: str | None) -> None:
    from PIL import Image

    (tmp_path / "cifar10").mkdir()
    Image.new("RGB", (1024, 3)).save(tmp_path / "cifar10" / "cifar10_batch_0.png")
    if labels is not None:
        (tmp_path / "cifar10" / "labels.json").write_text(labels)
    monkeypatch.setenv("VKERNEL_DATA", str(tmp_path))
    with pytest.raises(Skip, match=r"labels\.json .*[.]$"):
        images.cifar_line(Run(tmp_path, 0, True, lambda share: None))


def test_ends_of_images_against_brute_force() -> None:
    data = vk.data.digits()
    sizes = SimpleNamespace(data=data, starts=2, runs=2, kappas=(0.1,), steps=25)
    end = images.ends(Run(Path(), 0, True, print), "digits", sizes)
    assert end.x.shape == (1, 2, 2, *data.shape)
    rows = data.rows(0, data.n).reshape(data.n, -1).double()
    distance = (rows - end.x[0, 1, 0].double().reshape(-1)).norm(dim=1)
    assert int(end.at[0, 1, 0]) == int(distance.argmin())
    assert float(end.distance[0, 1, 0]) == pytest.approx(float(distance.min()), rel=1e-3)
    assert (end.second >= end.distance).all()
    assert (end.elsewhere == (end.at != end.flow_at)).all()


def test_pictures_refuse_what_they_cannot_draw() -> None:
    pictures = np.zeros((2, 3, 4, 4))
    with pytest.raises(InputError, match="one mark"):
        plots.end_images(pictures[:, 0], pictures, ["a", "b"], [("g", 3)], np.zeros((1, 3)), [[""] * 3] * 2)
    with pytest.raises(InputError, match="groups"):
        plots.end_images(pictures[:, 0], pictures, ["a", "b"], [("g", 2)], np.zeros((2, 3)), [[""] * 3] * 2)
