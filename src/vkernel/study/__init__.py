"""Studies: declared sweeps over ensembles, which survive being killed and run unchanged on a cluster.

A study is a file (:mod:`vkernel.study.spec`); its results are labelled arrays in a Zarr store
(:mod:`vkernel.study.store`), computed in blocks of members (:mod:`vkernel.study.work`), one after the other or on a Ray
cluster (:mod:`vkernel.study.runners`). The contents of a block depend on the study and the block's index alone."""

from vkernel.core.errors import needs

needs("Studies, and the exhibits that run them,", "study", "zarr", "pydantic", "filelock", "torchdiffeq")

from vkernel.study import report  # noqa: E402
from vkernel.study.merge import merge  # noqa: E402
from vkernel.study.report import export  # noqa: E402
from vkernel.study.runners import run  # noqa: E402
from vkernel.study.spec import Spec, parse_part, read, shipped  # noqa: E402
from vkernel.study.store import load  # noqa: E402

__all__ = ["Spec", "export", "load", "merge", "parse_part", "read", "report", "run", "shipped"]
