"""What does a diffusion model really learn from a finite data set?

``vkernel`` computes what is exact about training a diffusion model on a finite set of points: the true score, the
covariance of the training target around it (the proxy-score covariance C), and where and when that target is noisy.

>>> import torch, vkernel as vk
>>> process = vk.VP()
>>> score = vk.EmpiricalScore(vk.Empirical(torch.tensor([-1.0, 0.0, 1.0])), process)
>>> score(torch.tensor([[0.5]]), 0.1).shape
torch.Size([1, 1])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from vkernel.version import __version__

# Public names by the module that defines them. They are imported on first use: ``import vkernel`` imports torch and
# numpy only.
_DEFINED = {
    "adapters.checkpoints": "Checkpoint Checkpoints",
    "adapters.diffusers": "as_unet",
    "core.errors": "InputError",
    "core.estimate": "Estimate",
    "data.empirical": "Empirical",
    "data.loaders": "load",
    "process": "Anisotropic Cosine DDPM EDM FlowMatching Process Toy VE VP VPSong",
    "reports.audit.audit": "audit",
    "reports.compare": "compare",
    "reports.profile": "Profile profile",
    "sample.scores": "Scores",
    "score.base": "Score",
    "score.conversions": "proxy_score to_flow to_noise to_v to_x0",
    "score.empirical": "EmpiricalScore noise_fraction",
    "score.mixture": "GaussianMixture",
    "score.wrapped": "as_score",
    "train.ensemble": "Ensemble load_ensemble train_ensemble variance_split",
    "train.objectives": "J0 J1 JC JK",
}
_NAMES = {name: module for module, names in _DEFINED.items() for name in names.split()}
_PACKAGES = "adapters core data kernels metrics plots posterior process reports reproduce sample score study train"
_MODULES = {name: name for name in _PACKAGES.split()}
_MODULES |= {"features": "train.features", "models": "train.models", "path": "sample.path"}

__all__ = ["__version__", *_NAMES, *_MODULES]


def __getattr__(name: str) -> object:
    if name in _NAMES:
        value = getattr(importlib.import_module(f"vkernel.{_NAMES[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"vkernel.{_MODULES[name]}")
    else:
        raise AttributeError(f"module 'vkernel' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if TYPE_CHECKING:
    from vkernel import (
        adapters,
        core,
        data,
        kernels,
        metrics,
        plots,
        posterior,
        process,
        reports,
        reproduce,
        sample,
        score,
        study,
        train,
    )
    from vkernel.adapters.checkpoints import Checkpoint, Checkpoints
    from vkernel.adapters.diffusers import as_unet
    from vkernel.core.errors import InputError
    from vkernel.core.estimate import Estimate
    from vkernel.data.empirical import Empirical
    from vkernel.data.loaders import load
    from vkernel.process import DDPM, EDM, VE, VP, Anisotropic, Cosine, FlowMatching, Process, Toy, VPSong
    from vkernel.reports.audit.audit import audit
    from vkernel.reports.compare import compare
    from vkernel.reports.profile import Profile, profile
    from vkernel.sample import path
    from vkernel.sample.scores import Scores
    from vkernel.score.base import Score
    from vkernel.score.conversions import proxy_score, to_flow, to_noise, to_v, to_x0
    from vkernel.score.empirical import EmpiricalScore, noise_fraction
    from vkernel.score.mixture import GaussianMixture
    from vkernel.score.wrapped import as_score
    from vkernel.train import features, models
    from vkernel.train.ensemble import Ensemble, load_ensemble, train_ensemble, variance_split
    from vkernel.train.objectives import J0, J1, JC, JK
