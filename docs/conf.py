"""The documentation site. `make docs` builds it offline, and a warning is an error.

The source folder is the repository, so that links from a page to CONTRIBUTING.md or to code are
checked too.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from generate import write  # noqa: E402 - beside this file

write(HERE / "reference")

project = "atoll"
author = "the atoll developers"
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/how-to/*.md",
    "docs/methods/*.md",
    "docs/reference/*.md",
    "docs/reproduction/*.md",
    "docs/reproduction/*/*.md",
]

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 6
suppress_warnings = ["myst.header"]  # a ledger begins at the second level: it is a part of a page

html_theme = "furo"
html_title = "atoll"
html_extra_path = ["site"]  # sends readers of the first page to docs/index.html
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
