"""Sphinx configuration. Build: ``sphinx-build -a -W --keep-going -n -b html docs docs/_build/html`` (``make docs``)."""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "docs")]

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
    "checks",
]
exclude_patterns = ["_build", "node_modules"]
templates_path: list[str] = []

# -- Pages ------------------------------------------------------------------------------------------------------------
myst_enable_extensions = ["dollarmath", "amsmath", "deflist", "colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"vkernel {release}"
html_static_path = ["_static"]
html_css_files = ["vkernel.css"]
html_js_files = ["wide.js"]

# -- Mathematics: the site ships the script that renders it (package-lock.json), so that no page needs a network -----
MATHJAX = Path("node_modules/mathjax/es5/tex-svg-full.js")  # glyphs are drawn as SVG, so that no font is loaded either
if not (ROOT / "docs" / MATHJAX).exists():
    raise SystemExit("The renderer of mathematics is not installed; run `make docs`, or `npm ci` in docs/.")
html_static_path += [str(MATHJAX)]
mathjax_path = MATHJAX.name
mathjax3_config = {"svg": {"fontCache": "global"}, "options": {"enableMenu": False}}
html_copy_source = False
html_show_sourcelink = False

# -- API, from docstrings in plain reStructuredText -------------------------------------------------------------------
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_type_aliases = {"ArrayLike": "ArrayLike", "npt.ArrayLike": "ArrayLike"}
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
# There is no intersphinx, since the build must work without a network: what other packages define has no page here.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|numpy|np|xarray|matplotlib|PIL|pathlib|os|rich|collections|typing|types|abc|dist|plt)(\..+)?"),
    # Type variables, aliases and internal types that signatures show.
    (
        r"py:class",
        r"vkernel\.[\w.]+\.(Kind|N|T|Sampling|Taking|Chunk|Weights|Alone|Ranks|SparseWeights|DenseWeights|GPUPath|Dense|Pruned|ScoreUNet|NetworkKernel|LinearField|Trained|Cell|Errors)",
    ),
    (
        r"py:class",
        r"Array|Callback|Save|Data|Indices|Labels|Members|Mesh|Scale|Times|Values|Weight|Theory|Progress|Reporter|DeviceMesh|MatplotlibFigure|annotated_types\..+",
    ),
    (r"py:class", r"vkernel\.study\.spec\.\w+|spec\.\w+|Spec|Condition|Group|dict\[str"),
    # Annotations are strings (PEP 563); inside unions autodoc may leave these as they are written.
    (r"py:class", r"Tensor|Generator|Path|Any|Callable|Iterable|Iterator|Sequence|Mapping|Score|Figure|Axes|optional"),
    # Names of the top level and of a module's internals, which docstrings mention and other sections describe.
    (
        r"py:(class|func|data)",
        r"vkernel\.(audit|compare|JC|noise_fraction|load|as_score|variance_split|posterior\.gpu\.fp16\.accumulation)",
    ),
    (r"py:func", r"vkernel\.metrics\.features\.extractor"),
    (
        r"py:(class|func|data)",
        r"InputError|PREDICTIONS|load|Level|Problem|walk|Recordings|accumulation|IMAGES",
    ),
    (r"py:class", r"Graph"),
    # Napoleon reads the words before a colon in the docstring of a property as its type.
    (r"py:class", r".+ .+"),
]
# Modules of the package that have no section of their own may be mentioned.
MODULES = (path.relative_to(ROOT / "src").with_suffix("") for path in (ROOT / "src").rglob("*.py"))
nitpick_ignore = [("py:mod", ".".join(path.parts).removesuffix(".__init__")) for path in MODULES]

# -- Tutorials and gallery: every picture is made by running its script -----------------------------------------------
sphinx_gallery_conf = {
    "examples_dirs": ["../tutorials", "../examples"],
    "gallery_dirs": ["tutorials", "gallery"],
    "filename_pattern": r"/plot_|/tutorials/\d_",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "remove_config_comments": True,
    "download_all_examples": False,
    "show_signature": False,
    "write_computation_times": False,
}
