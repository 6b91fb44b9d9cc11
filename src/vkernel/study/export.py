"""Results of a study for other programs: NetCDF with everything, or CSV with one number per member a row."""

from __future__ import annotations

import tempfile
from pathlib import Path

from vkernel.core.errors import InputError, require
from vkernel.core.files import write
from vkernel.study.report import scalars
from vkernel.study.store import load

__all__ = ["export"]


def export(store: str | Path, out: str | Path) -> Path:
    """Write ``out``, whole or not at all; its suffix, .nc or .csv, says how."""
    out = Path(out)
    require(out.suffix in (".nc", ".csv"), f"A study is exported to a .nc or .csv file, not {out.name!r}.")
    found = load(store)
    if out.suffix == ".csv":
        frame = found[scalars(found)].to_dataframe().reset_index()
        return write(out, frame.to_csv(index=False))
    try:
        import h5netcdf  # noqa: F401
    except ImportError:
        raise InputError("NetCDF needs h5netcdf: pip install 'vkernel[study]'. Or export to .csv.") from None
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "study.nc"
        found.load().to_netcdf(made, engine="h5netcdf", invalid_netcdf=False)
        return write(out, made.read_bytes())
