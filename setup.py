"""What depends on the build; everything else is declared in pyproject.toml.

The compiled parts are `optional`: without a C compiler the package is installed without them, and Python and numpy do
the same, slower. They need only what is stable in Python's C interface, so one wheel serves all versions from 3.11 on.

`scripts/release` sets two variables: ENERGON_BRIDGE_PURE=1 leaves the compiled parts out, for a wheel that is installed
anywhere; ENERGON_BRIDGE_URL is the address of the repository, which an index page shows, and which the README's links
lead to there. Without an address, links into the checkout become words, since an index has nothing to lead to.
"""

import os
import re
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

HERE = Path(__file__).parent
URL = os.environ.get("ENERGON_BRIDGE_URL", "").rstrip("/")
COMPILED = [
    Extension(
        name,
        [name.replace(".", "/") + ".c"],
        depends=["energon_bridge/core/processor.h"],
        extra_compile_args=["-O3"],
        py_limited_api=True,
        optional=True,
    )
    for name in ("energon_bridge.core.format._tar", "energon_bridge.core.samples._pixels")
]


def readme() -> str:
    """Return the README as an index shows it, where no file lies beside it."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    core = (HERE / "energon_bridge/core/__init__.py").read_text()
    (version,) = re.findall(r'^__version__ = "(.+)"', core, re.MULTILINE)
    target = rf"[\1]({URL}/blob/v{version}/\2)" if URL else r"\1"
    return re.sub(r"\[([^]]+)\]\((?![a-z]+:)([^)]+)\)", target, text)


options: dict = {"long_description": readme(), "long_description_content_type": "text/markdown"}
if URL:
    pages = {
        "Repository": "",
        "Documentation": "/tree/main/docs",
        "Changelog": "/blob/main/CHANGELOG.md",
        "Issues": "/issues",
    }
    options["project_urls"] = {name: URL + page for name, page in pages.items()}
# Python without the interpreter lock has no such stable interface yet.
if not (sysconfig.get_config_var("Py_GIL_DISABLED") or os.environ.get("ENERGON_BRIDGE_PURE")):
    options |= {"ext_modules": COMPILED, "options": {"bdist_wheel": {"py_limited_api": "cp311"}}}
setup(**options)
