"""Public names and the modules that define them: for type checkers, and for __init__.py, which imports on use."""

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
    theories,
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
from vkernel.reports.audit.saved import audit_samples
from vkernel.reports.compare import compare
from vkernel.reports.explain.explain import explain
from vkernel.reports.monitor.monitor import Monitor
from vkernel.reports.profile import Profile, profile
from vkernel.sample import path
from vkernel.sample.scores import Scores
from vkernel.score.base import Score
from vkernel.score.conversions import proxy_score, to_flow, to_noise, to_v, to_x0
from vkernel.score.empirical import EmpiricalScore, noise_fraction
from vkernel.score.mixture import GaussianMixture
from vkernel.score.wrapped import as_score
from vkernel.train import features, models
from vkernel.train.ensemble import Ensemble, load_ensemble, train_ensemble, train_ensembles, variance_split
from vkernel.train.noise_fraction import network_noise_fraction
from vkernel.train.objectives import J0, J1, JC, JK
from vkernel.train.targets import Targets

__version__: str
__all__ = [
    "DDPM",
    "EDM",
    "J0",
    "J1",
    "JC",
    "JK",
    "VE",
    "VP",
    "Anisotropic",
    "Checkpoint",
    "Checkpoints",
    "Cosine",
    "Empirical",
    "EmpiricalScore",
    "Ensemble",
    "Estimate",
    "FlowMatching",
    "GaussianMixture",
    "InputError",
    "Monitor",
    "Process",
    "Profile",
    "Score",
    "Scores",
    "Targets",
    "Toy",
    "VPSong",
    "adapters",
    "as_score",
    "as_unet",
    "audit",
    "audit_samples",
    "compare",
    "core",
    "data",
    "explain",
    "features",
    "kernels",
    "load",
    "load_ensemble",
    "metrics",
    "models",
    "network_noise_fraction",
    "noise_fraction",
    "path",
    "plots",
    "posterior",
    "process",
    "profile",
    "proxy_score",
    "reports",
    "reproduce",
    "sample",
    "score",
    "study",
    "theories",
    "to_flow",
    "to_noise",
    "to_v",
    "to_x0",
    "train",
    "train_ensemble",
    "train_ensembles",
    "variance_split",
]
