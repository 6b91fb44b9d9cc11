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
from typing import TYPE_CHECKING, Any

from vkernel.version import __version__

# Names are resolved when they are first used: ``import vkernel`` costs torch and numpy, nothing more.
_HOME = {
    "Anisotropic": "process",
    "Cosine": "process",
    "DDPM": "process",
    "EDM": "process",
    "Empirical": "data",
    "EmpiricalScore": "score",
    "Ensemble": "ensemble",
    "Estimate": "estimate",
    "FlowMatching": "process",
    "GaussianMixture": "mixture",
    "InputError": "errors",
    "JK": "objective",
    "Process": "process",
    "Profile": "profiling",
    "Toy": "process",
    "VE": "process",
    "VP": "process",
    "VPSong": "process",
    "audit": "auditing",
    "compare": "comparison",
    "load": "loaders",
    "load_ensemble": "ensemble",
    "noise_fraction": "score",
    "profile": "profiling",
    "proxy_score": "score",
    "train_ensemble": "ensemble",
    "variance_split": "variance",
}
_MODULES = (
    "auditing",
    "comparison",
    "covariance",
    "data",
    "ensemble",
    "estimate",
    "features",
    "kernels",
    "loaders",
    "metrics",
    "mixture",
    "models",
    "objective",
    "path",
    "plots",
    "posterior",
    "predictions",
    "process",
    "profiling",
    "reproduce",
    "rng",
    "sample",
    "score",
    "study",
    "variance",
)

__all__ = [
    "DDPM",
    "EDM",
    "JK",
    "VE",
    "VP",
    "Anisotropic",
    "Cosine",
    "Empirical",
    "EmpiricalScore",
    "Ensemble",
    "Estimate",
    "FlowMatching",
    "GaussianMixture",
    "InputError",
    "Process",
    "Profile",
    "Toy",
    "VPSong",
    "__version__",
    "audit",
    "auditing",
    "compare",
    "comparison",
    "covariance",
    "data",
    "ensemble",
    "estimate",
    "features",
    "kernels",
    "load",
    "load_ensemble",
    "loaders",
    "metrics",
    "mixture",
    "models",
    "noise_fraction",
    "objective",
    "path",
    "plots",
    "posterior",
    "predictions",
    "process",
    "profile",
    "profiling",
    "proxy_score",
    "reproduce",
    "rng",
    "sample",
    "score",
    "study",
    "train_ensemble",
    "variance",
    "variance_split",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"vkernel.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"vkernel.{name}")
    else:
        raise AttributeError(f"module 'vkernel' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


if TYPE_CHECKING:
    from vkernel import (
        auditing,
        comparison,
        covariance,
        data,
        ensemble,
        estimate,
        features,
        kernels,
        loaders,
        metrics,
        mixture,
        models,
        objective,
        path,
        plots,
        posterior,
        predictions,
        process,
        profiling,
        reproduce,
        rng,
        sample,
        score,
        study,
        variance,
    )
    from vkernel.comparison import compare
    from vkernel.data import Empirical
    from vkernel.ensemble import Ensemble, load_ensemble, train_ensemble
    from vkernel.errors import InputError
    from vkernel.estimate import Estimate
    from vkernel.loaders import load
    from vkernel.mixture import GaussianMixture
    from vkernel.objective import JK
    from vkernel.process import DDPM, EDM, VE, VP, Anisotropic, Cosine, FlowMatching, Process, Toy, VPSong
    from vkernel.profiling import Profile, profile
    from vkernel.score import EmpiricalScore, noise_fraction, proxy_score
    from vkernel.variance import variance_split
