r"""
From one digit to another
=========================

Target noise along the straight line from one image of scikit-learn's digits to another. With only the two images as
training set it is the :math:`\operatorname{sech}^2` of theory (2.19); with all 1,797, other images carry weight in
between. As the noise level falls, it vanishes at the two ends, where training images lie (2.21). On the right,
the output of the ideal denoiser at nine points of the line, row by row: it changes abruptly instead of blending.
"""

import matplotlib.pyplot as plt
import torch

import vkernel as vk

process = vk.EDM()  # alpha = 1 and t is the noise level sigma, so that the line runs through the data itself
digits = vk.data.digits()
first, last = 0, 6  # the first "0" and the first "6"
two = digits.subset([first, last])
where = torch.linspace(0, 1, 401, dtype=torch.float64)
y0, y1 = digits[[first, last]].double()
path = y0 + where[:, None, None, None] * (y1 - y0)

fig, axes = plt.subplots(1, 3, figsize=(10, 3.2), width_ratios=(1, 1, 0.9), layout="constrained")
for ax, data, title in zip(axes, (two, digits), ("two images", "all 1,797"), strict=False):
    score = vk.EmpiricalScore(data, process)
    for sigma in (1.6, 0.8, 0.4):
        ax.plot(where, sigma**2 * score.covariance(path, sigma).trace(), label=f"sigma = {sigma}")
    ax.set(title=title, xlabel="position on the line", ylabel=r"$\sigma^2\,\mathrm{tr}\,C$")
gap = float((y1 - y0).square().sum())
half = gap / (2 * 0.4**2) * (0.5 - where)
axes[0].plot(where, gap / (4 * 0.4**2) / half.cosh() ** 2, "k:", label="closed form")
axes[0].legend()

denoised = vk.EmpiricalScore(digits, process).posterior(path[::50], 0.8).mean[:, 0]
tiles = torch.nn.functional.pad(denoised, (1, 1, 1, 1), value=-1.5)
axes[2].imshow(tiles.reshape(3, 3, 10, 10).permute(0, 2, 1, 3).reshape(30, 30), cmap="gray_r")
axes[2].set(title="denoised, sigma = 0.8", xticks=(), yticks=())
plt.show()
