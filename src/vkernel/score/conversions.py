r"""What networks predict, and its score (docs/theory.md, §1.5).

With :math:`x = \alpha x_0 + \sigma\epsilon` and :math:`\dot x = -\beta x - D s` the probability flow, each prediction f
is linear in x and in the score, :math:`c f = a x + b s`:

========  =========================================  ======================  ====================  ===================
predicts  target                                     c                       a                     b
========  =========================================  ======================  ====================  ===================
score     :math:`s = \nabla\log p`                   1                       0                     1
noise     :math:`\epsilon`                           1                       0                     :math:`-\sigma`
x0        :math:`x_0`                                :math:`\alpha`          1                     :math:`\sigma^2`
v         :math:`\alpha\epsilon - \sigma x_0`        :math:`\alpha`          :math:`-\sigma`       :math:`-\sigma h^2`
flow      :math:`\dot x`                             1                       :math:`-\beta`        :math:`-D`
edm       :math:`(x_0 - c_{skip} x/\alpha)/c_{out}`  :math:`\alpha c_{out}`  :math:`1 - c_{skip}`  :math:`\sigma^2`
========  =========================================  ======================  ====================  ===================

with :math:`h^2 = \alpha^2 + \sigma^2`, :math:`c_{skip} = 1/(1 + r)`, :math:`c_{out} = \sigma_d \sqrt{r/(1 + r)}` and
:math:`r = \sigma^2/(\alpha\sigma_d)^2` for data of standard deviation :math:`\sigma_d` (Karras et al. 2022); v is that
of Salimans and Ho (2022)."""

from collections.abc import Callable

from torch import Tensor

from vkernel.core.checks import check_choice, check_real
from vkernel.core.errors import require
from vkernel.process import Anisotropic, Process
from vkernel.process.base import real_dtype, wide_dtype
from vkernel.score.base import Score, Time, as_time, check_score

PREDICTIONS = ("noise", "x0", "v", "flow", "edm", "score")
OTHER_NAMES = {"epsilon": "noise", "eps": "noise", "sample": "x0", "x_start": "x0", "v_prediction": "v"}
OTHER_NAMES |= {"velocity": "flow", "flow_prediction": "flow"}
ISOTROPIC = "Noise, x0, v, flow and edm predictions are defined for isotropic noise."


def check_predicts(predicts: str) -> str:
    """Return what a network predicts, if it is one of :data:`PREDICTIONS`; other libraries' names are translated in
    the error."""
    known = OTHER_NAMES.get(predicts) if isinstance(predicts, str) else None
    require(known is None, f'predicts="{predicts}" is called "{known}" here.')
    return check_choice(predicts, "predicts", PREDICTIONS)


def convert(
    out: Tensor,
    predicts: str,
    wants: str,
    x: Tensor,
    t: Time,
    process: Process,
    sigma_data: float = 0.5,
    checked: bool = False,
) -> Tensor:
    """Convert the prediction ``out`` at ``(x, t)`` into another of :data:`PREDICTIONS`; the result is like ``x``.
    With ``checked``, t is known to be in [eps, T], and no value of a tensor on a GPU is looked at.

    >>> import torch, vkernel as vk
    >>> x, noise = torch.zeros(3, 2), torch.ones(3, 2)
    >>> vk.score.convert(noise, "noise", "x0", x, 0.5, vk.FlowMatching())[0]  # (x - t noise) / (1 - t)
    tensor([-1., -1.])
    """
    check_real(x, "x")
    if predicts == wants:
        return out
    check_real(out, "The prediction")
    if isinstance(process, Anisotropic):
        require((predicts, wants) == ("x0", "score"), ISOTROPIC)
        white = process.whiten
        return white(convert(white(out), predicts, wants, white(x), t, process.base))
    t = as_time(t, x.device)
    full = tuple(t.shape) + (1,) * (x.ndim - t.ndim)
    good = t.ndim <= x.ndim and all(a in (1, b) for a, b in zip(full, x.shape, strict=True))
    require(good, f"t has shape {tuple(t.shape)}, which does not broadcast over x, of shape {tuple(x.shape)}.")
    wide = (t if checked else process.check(t)).double().clamp(process.eps, process.T).reshape(full)
    alpha, sigma = (f(wide).to(wide_dtype(real_dtype(x.dtype))) for f in (process.alpha, process.sigma))
    if "edm" in (predicts, wants):  # through x0: through the score, large noise would cancel
        r = (sigma / alpha).square() / sigma_data**2
        skip, c_out = x / alpha / (1 + r), sigma_data * (r / (1 + r)).sqrt()
        if predicts == "edm":
            return convert((skip + c_out * out).to(real_dtype(x.dtype)), "x0", wants, x, t, process, checked=checked)
        found = convert(out, predicts, "x0", x, t, process, checked=checked)
        return ((found - skip) / c_out).to(real_dtype(x.dtype))

    def row(name: str) -> tuple[float | Tensor, float | Tensor, Tensor]:
        if name == "noise":
            return 1, 0, -sigma
        if name == "x0":
            return alpha, 1, sigma.square()
        if name == "v":
            return alpha, -sigma, -sigma * (alpha.square() + sigma.square())
        return 1, -process.beta(wide).to(sigma), -process.D(wide).to(sigma)

    s = out
    if predicts != "score":
        c, a, b = row(predicts)
        s = (c * out - a * x) / b
    if wants != "score":
        c, a, b = row(wants)
        s = (a * x + b * s) / c
    return s.to(real_dtype(x.dtype))


def proxy_score(x: Tensor, t: Time, x0: Tensor, process: Process) -> Tensor:
    r"""Return the proxy score :math:`\tilde s = S^{-1} (\alpha x_0 - x)`, the target of score matching (2.5).

    >>> import torch, vkernel as vk
    >>> x, x0 = torch.zeros(4, 2), torch.ones(4, 2)
    >>> vk.proxy_score(x, 0.5, x0, vk.FlowMatching())[0]  # (0.5 · 1 - 0) / 0.25
    tensor([2., 2.])
    """
    return convert(x0, "x0", "score", x, t, process)


def to_noise(score: Score) -> Callable[[Tensor, Time], Tensor]:
    r"""Return the noise prediction :math:`-\sigma s` of a score.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> vk.to_noise(score)(torch.zeros(5, 1), 0.5).shape
    torch.Size([5, 1])
    """
    return _converted(score, "noise")


def to_x0(score: Score) -> Callable[[Tensor, Time], Tensor]:
    r"""Return the x0 prediction :math:`(x + \sigma^2 s)/\alpha` of a score.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> x = torch.full((1, 1), 0.9)
    >>> round(float(vk.to_x0(score)(x, 0.02)), 3)  # the nearest of -1, 0 and 1
    1.0
    """
    return _converted(score, "x0")


def to_v(score: Score) -> Callable[[Tensor, Time], Tensor]:
    r"""Return the v prediction :math:`\alpha\,\epsilon - \sigma x_0` of a score.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> vk.to_v(score)(torch.zeros(5, 1), 0.5).shape
    torch.Size([5, 1])
    """
    return _converted(score, "v")


def to_flow(score: Score) -> Callable[[Tensor, Time], Tensor]:
    r"""Return the velocity :math:`-\beta x - D s` of the probability flow of a score.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> vk.to_flow(score)(torch.zeros(5, 1), 0.5).shape
    torch.Size([5, 1])
    """
    return _converted(score, "flow")


def _converted(score: Score, wants: str) -> Callable[[Tensor, Time], Tensor]:
    process = check_score(score, "A conversion").process
    require(not isinstance(process, Anisotropic), ISOTROPIC)

    def converted(x: Tensor, t: Time) -> Tensor:
        x, when = score.check(x, t)
        return convert(score(x, t), "score", wants, x, when.to(x.device).expand(score.split(x)[0]), process)

    return converted
