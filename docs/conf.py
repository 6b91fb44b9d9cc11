"""Sphinx configuration. Build: ``sphinx-build -W --keep-going -n -b html docs docs/_build/html`` (``make docs``)."""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

project = "vkernel"
author = "The vkernel authors"
project_copyright = author
release = runpy.run_path(str(ROOT / "src" / "vkernel" / "version.py"))["__version__"]
version = release

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build"]
templates_path: list[str] = []

# -- Pages ------------------------------------------------------------------------------------------------------------
myst_enable_extensions = ["dollarmath", "amsmath", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"vkernel {release}"
html_static_path = ["_static"]
html_css_files = ["vkernel.css"]
html_copy_source = False
html_show_sourcelink = False

# -- API, from docstrings in plain reStructuredText -------------------------------------------------------------------
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
# There is no intersphinx, since the build must work without a network: what other packages define has no page here.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|numpy|np|xarray|matplotlib|PIL|pathlib|os|collections|typing|types|abc)(\..+)?"),
    # Internal types that signatures show.
    (
        r"py:class",
        r"vkernel\.posterior\.pieces\.\w+|vkernel\.posterior\.(ladder\.Ladder|cuda\.Fast)|(vkernel\.progress\.)?Reporter",
    ),
    (r"py:class", r"(vkernel\.study\.)?spec\.\w+|Spec|Condition|annotated_types\..+"),
    (r"py:class", r"vkernel\.auditing\.(pipelines|ground|copying)\.\w+|Group|dict\[str"),
    # Annotations are strings (PEP 563); inside unions autodoc may leave these as they are written.
    (r"py:class", r"Tensor|Generator|Path|Any|Callable|Iterable|Iterator|Sequence|Mapping|Score|Figure|Axes|optional"),
]

# -- Gallery: every picture is made by running its script -------------------------------------------------------------
sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": "/plot_",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "remove_config_comments": True,
    "download_all_examples": False,
    "show_signature": False,
    "write_computation_times": False,
}
