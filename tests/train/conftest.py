"""Fixtures of the tests of ensembles."""

from __future__ import annotations

import pytest
from ensembles import MODELS, train

from vkernel.train.ensemble import Ensemble


@pytest.fixture(scope="module", params=MODELS)
def ens(request) -> Ensemble:
    model, points = MODELS[request.param]
    return train(model, points, members=5, draws=20)


@pytest.fixture(scope="module")
def line() -> Ensemble:
    return train()
