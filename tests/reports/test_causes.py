"""Shares of causes in the variance over trainings, of studies with planted ones."""

import numpy as np
import pytest
import xarray
from planted import Effect, planted

from vkernel.core.errors import InputError
from vkernel.reports.target_noise import causes, causes_table

KEY = ("digits", 16, "unet")


def study(**V: float) -> xarray.Dataset:
    """Return a study whose causes have V times that of ``all``; the draws of members are the same, as of twins."""
    parts = [planted({KEY: {"c = 1": Effect(V=v)}}, noise=0.0) for v in (1.0, *V.values())]
    return xarray.concat(parts, xarray.IndexVariable("cause", ["all", *V]))


def test_planted_shares_are_found_with_their_intervals():
    found = causes(study(init=0.9, targets=0.25), draws=300).sel(objective="c = 1").squeeze("cell")
    for cause, share in (("init", 0.9), ("targets", 0.25)):
        low, value, high = (found["share"].sel(cause=cause, end=end).values for end in ("low", "value", "high"))
        np.testing.assert_allclose(value, share, rtol=0.1)  # a share of 3 % of the planted members is not shared
        assert ((low <= share) & (share <= high)).mean() > 0.8
    assert found["V_all"].sel(end="value").notnull().all()


def test_what_was_not_run_is_unknown_and_not_in_the_table():
    ds = study(init=0.9, targets=0.25)
    ds["error"] = ds["error"].where(ds["cause"] != "targets")
    found = causes(ds, draws=20)
    assert found["share"].sel(cause="targets").isnull().all()
    assert found["share"].sel(cause="init", objective="c = 1").notnull().all()
    assert causes_table(found).row_count == found.sizes["level"]


def test_a_study_without_causes_is_refused():
    with pytest.raises(InputError, match="factor cause that has the value 'all'"):
        causes(planted({KEY: {"c = 1": Effect()}}))
