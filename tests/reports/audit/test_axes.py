"""Images are given to a network with the axes that it takes."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vkernel as vk
from vkernel.reports.audit.axes import arranged, for_network


class Conv(nn.Module):
    """Takes (B, channels, height, width) alone."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize(
    ("channels", "stored", "wanted"),
    [
        (1, (6, 5), (1, 6, 5)),
        (1, (6, 5, 1), (1, 6, 5)),
        (3, (6, 5, 3), (3, 6, 5)),
        (3, (3, 6, 5), (3, 6, 5)),
        (3, (6, 5), (6, 5)),  # nothing fits: the audit says what the network raised
        (1, (30,), (30,)),
    ],
)
def test_channels_come_first(channels: int, stored: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    net = vk.as_score(Conv(channels), vk.VP(), predicts="noise", time="t")
    assert for_network(net, stored) == wanted
    pixels = np.random.default_rng(0).integers(0, 256, (20, *stored), dtype=np.uint8)
    data = arranged(vk.Empirical(pixels, np.arange(20) + 1.0, scale=(-1, 1), name="mine"), wanted)
    assert (data.shape, data.stored, data.scale, data.name) == (wanted, "uint8", (-1.0, 1.0), "mine")
    expected = pixels if len(stored) == len(wanted) != 3 or stored == wanted else pixels.reshape(20, 6, 5, -1)
    if expected is not pixels:
        expected = np.moveaxis(expected, -1, 1)
    torch.testing.assert_close(data[:], torch.from_numpy(expected).float() / 127.5 - 1)
    torch.testing.assert_close(data.weights, (torch.arange(20.0) + 1).double() / 210)


def test_a_network_that_takes_the_stored_shape_keeps_it() -> None:
    assert for_network(vk.as_score(lambda x, t: x, vk.VP(), predicts="noise", time="t"), (6, 5)) == (6, 5)
