"""The site's settings, for Sphinx: `make site`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402

project = "torch.attn"

version = release = str(torch.__version__)

extensions = [
    "generated_pages",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx-mathjax-offline",  # MathJax and its fonts, in the site
]
exclude_patterns = ["tests", "requirements.txt"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # a commit's message begins with headings of the second level

html_theme = "furo"
html_title = "torch.attn"
html_favicon = "static/favicon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
