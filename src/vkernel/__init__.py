"""What does a diffusion model really learn from a finite data set?

``vkernel`` computes what is exact about training a diffusion model on a finite set of points: the true score, the
covariance of the training target around it (the proxy-score covariance C), and where and when that target is noisy.

>>> import torch, vkernel as vk
>>> process = vk.VP()
>>> score = vk.EmpiricalScore(vk.Empirical(torch.tensor([-1.0, 0.0, 1.0])), process)
>>> score(torch.tensor([[0.5]]), 0.1).shape
torch.Size([1, 1])
"""

import ast
import importlib
from pathlib import Path

from vkernel.version import __version__ as __version__

# The stub lists public names by the module that defines them (SPEC 1 of Scientific Python). They are imported on first
# use: ``import vkernel`` imports torch and numpy only.
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf8")).body
_NAMES = {name.name: str(node.module) for node in _STUB if isinstance(node, ast.ImportFrom) for name in node.names}
_PACKAGES = {path.parent.name for path in Path(__file__).parent.glob("*/__init__.py")} | {"features", "models", "path"}
__all__ = ["__version__", *_NAMES]


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(f"module 'vkernel' has no attribute {name!r}")
    package = name in _PACKAGES
    module = importlib.import_module(f"{_NAMES[name]}.{name}" if package else _NAMES[name])
    globals()[name] = value = module if package else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
