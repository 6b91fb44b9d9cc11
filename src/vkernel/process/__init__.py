r"""Forward processes: how data turn into noise (``docs/theory.md``, section 1).

A process adds noise to data :math:`x_0` as :math:`t` runs from ``eps`` (data) to ``T`` (noise):

.. math:: dx = -\beta_t x\,dt + G_t\,dW, \qquad D_t = \tfrac12 G_t G_t^T, \qquad
          p(x \mid x_0, t) = \mathcal N(\alpha_t x_0,\; S_t), \qquad S_t = \sigma_t^2 I .

The drift and the diffusion follow from the two functions :math:`\alpha_t` and :math:`S_t`,

.. math:: \beta = -\alpha'/\alpha, \qquad D = \tfrac12 S' + \beta S, \qquad
          S_t = \alpha_t^2 \Big[ S_\epsilon/\alpha_\epsilon^2 + \int_\epsilon^t 2 D_u \alpha_u^{-2}\,du \Big].

=====================  ===================  ==========  ===============  ================  ================  ==========
process                alpha                S           beta             D                 t is              eps, T
=====================  ===================  ==========  ===============  ================  ================  ==========
:class:`VP`            exp(-B)              1 - alpha²  bmin + bd t      beta              part of the run   1e-3, 1
:class:`VPSong`        exp(-B/2)            1 - alpha²  (bmin + bd t)/2  beta              part of the run   1e-3, 1
:class:`DDPM`          prod (1 - beta_j)^½  1 - alpha²  -½ log(1-beta)   beta              network's index   0, N-1
:class:`Cosine`        cos θ / cos θ0       1 - alpha²  θ' tan θ         beta              part of the run   1e-3, .999
:class:`VE`            1                    sigma²      0                S log(smax/smin)  part of the run   0, 1
:class:`EDM`           1                    t²          0                t                 sigma itself      .002, 80
:class:`FlowMatching`  1 - t                t²          1/(1-t)          t/(1-t)           share of noise    1e-3, .999
:class:`Toy`           sqrt(1-t)            t           1/(2(1-t))       beta              noise's variance  1e-3, .999
=====================  ===================  ==========  ===============  ================  ================  ==========

Here B = bmin t + bd t²/2, bd = bmax - bmin; θ = (π/2)(t+s)/(1+s), θ0 = θ(0); and VE has sigma = smin (smax/smin)^t.
:class:`Anisotropic` has :math:`S_t = \sigma_t^2 \Gamma` and :math:`D_t = D^{\rm base}_t \Gamma`: it is an isotropic
process in the coordinates :math:`\Gamma^{-1/2} x`. Every process has ``base``, ``whiten`` and ``unwhiten`` (for an
isotropic one: itself, and twice the identity), so that code written for ``base`` in those coordinates serves all.

Three "VP" processes are in use, and the same two numbers mean different noise in each (§1.4): ``VPSong(beta_min=a,
beta_max=b)`` is ``VP(beta_min=a/2, beta_max=b/2)``, and ``DDPM.linear(1e-4, .02, 1000)`` is close to ``VPSong()``.
Between any two processes, :meth:`Process.convert` maps a point to the one with the same sigma/alpha.

alpha, sigma, S, beta, D and log_snr take a number or a tensor and return a tensor of t's shape, dtype and device
(numbers and integers: the default dtype). They are differentiable in t, free of cancellation at small t, and not
range-checked (:meth:`Process.check` is). Half precision is computed in float32 and rounded once."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

from vkernel.core.errors import InputError, require
from vkernel.process.base import Process
from vkernel.process.kinds import DDPM, EDM, VE, VP, Anisotropic, Cosine, FlowMatching, Toy, VPSong

__all__ = ["DDPM", "EDM", "PROCESSES", "VE", "VP", "Anisotropic", "Cosine", "FlowMatching", "Process", "Toy", "VPSong"]
__all__ += ["from_spec", "parse", "spec"]
PROCESSES: dict[str, type[Process]] = {"vp": VP, "vpsong": VPSong, "ddpm": DDPM, "cosine": Cosine, "ve": VE}
PROCESSES |= {"edm": EDM, "flow": FlowMatching, "toy": Toy}


def parse(text: str) -> Process:
    """Return the process that a command line names: ``"vp"``, ``"vp:beta_max=10,eps=1e-4"``, ``"ddpm:steps=100"``.

    >>> import vkernel as vk
    >>> vk.process.parse("vp:beta_max=10,eps=1e-4")
    VP: alpha = exp(-(0.1 t + 4.95 t²)), S = 1 - alpha², eps=0.0001, T=1
    """
    name, _, options = (part.strip() for part in text.partition(":"))
    cls = _named(name.lower())
    known = ["beta_start", "beta_end", "steps", "eps", "T"] if cls is DDPM else _fields(cls)
    given: dict[str, Any] = {}
    for option in filter(None, (part.strip() for part in options.split(","))):
        key, _, value = (part.strip() for part in option.partition("="))
        good = key in known and key not in given
        require(good, f"{name} takes {', '.join(known)}, each once; {option!r} is none of these.")
        try:
            given[key] = int(value) if key == "steps" else float(value)
        except ValueError:
            example = f"{name}:{key}={100 if key == 'steps' else 0.001}"
            raise InputError(f"{option!r} does not give {key} a number; write for example {example}.") from None
    return DDPM.linear(**given) if cls is DDPM else cls(**given)


def spec(process: Process) -> dict[str, object]:
    """Return the process as a dictionary for JSON, which :func:`from_spec` reads.

    >>> import vkernel as vk
    >>> vk.process.spec(vk.EDM())
    {'kind': 'edm', 'eps': 0.002, 'T': 80.0}
    """
    names = [name for name, cls in PROCESSES.items() if type(process) is cls]
    require(names, f"This process cannot be written down: {process!r}.")
    return {"kind": names[0], **{name: vars(process)[name] for name in _fields(type(process))}}


def from_spec(spec: Mapping[str, object]) -> Process:
    """Return the process of a :func:`spec`.

    >>> import vkernel as vk
    >>> vk.process.from_spec(vk.process.spec(vk.VP(eps=0.01))).eps
    0.01
    """
    given: dict[str, Any] = dict(spec)
    cls = _named(str(given.pop("kind", None)))
    try:
        return cls(**given)
    except TypeError as error:
        raise InputError(f"A {cls.__name__} process cannot be made from {given!r}: {error}.") from None


def _named(name: str) -> type[Process]:
    require(name in PROCESSES, f"There is no process {name!r}; give one of {', '.join(PROCESSES)}.")
    return PROCESSES[name]


def _fields(cls: type[Process]) -> list[str]:
    return [f.name for f in fields(cast(Any, cls))]
