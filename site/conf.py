"""The site's settings, for Sphinx: `make site`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
COURSE = HERE.parent / "course"
sys.path[:0] = [str(HERE), str(HERE.parent), str(COURSE), str(COURSE / "capabilities")]

import torch  # noqa: E402

project = "torch.attn"

version = release = str(torch.__version__)

extensions = [
    "downloads",
    "generated_pages",
    "sphinx_gallery.gen_gallery",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx-mathjax-offline",  # MathJax and its fonts, in the site
]
exclude_patterns = ["templates", "tests", "requirements.txt"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
suppress_warnings = [
    "myst.header",  # a commit's message begins with headings of the second level
    "sphinx_gallery.duplicate_filename",  # a lesson's solution has its name
]

sphinx_gallery_conf = {
    "examples_dirs": "../course",
    "gallery_dirs": "course",
    "filename_pattern": r"/\d\d_\w+\.py$",  # of the lessons
    "ignore_pattern": r"^(?!\d\d_)",  # of a file's name
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "capture_repr": (),  # what is printed is shown, and no more
    "download_all_examples": False,
    "min_reported_time": 1e9,  # a machine's seconds are not news
    "plot_gallery": not tags.has("no_lessons"),  # noqa: F821 Sphinx's, of `-t`
    "remove_config_comments": True,
    "show_signature": False,
    "write_computation_times": False,
}

html_theme = "furo"
html_theme_options = {
    "light_css_variables": {"picture-filter": "none", "shade": "#0003"},
    # White becomes black, and each colour keeps its hue.
    "dark_css_variables": {"picture-filter": "invert(0.9) hue-rotate(180deg)", "shade": "#fff4"},
}
html_title = "torch.attn"
html_favicon = "static/favicon.svg"
html_static_path = ["static"]
templates_path = ["templates"]
html_css_files = ["site.css"]
html_js_files = ["capabilities.js", "narrow.js"]
html_copy_source = False
html_search_scorer = str(HERE / "scorer.js")
html_show_copyright = False
html_show_sphinx = False
# Furo's own have no green and red for the lines of a diff.
pygments_style = "default"
pygments_dark_style = "github-dark"
