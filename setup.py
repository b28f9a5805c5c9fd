"""The compiled parts of the package; everything else is declared in pyproject.toml.

`optional`: without a C compiler the package is installed without them, and Python and numpy do the same, slower. They
need only what is stable in Python's C interface, so one wheel serves all versions from 3.11 on.
"""

import sysconfig

from setuptools import Extension, setup

COMPILED = [
    Extension(name, [name.replace(".", "/") + ".c"], extra_compile_args=["-O3"], py_limited_api=True, optional=True)
    for name in ("energon_bridge.format._tar", "energon_bridge.samples._pixels")
]
# Python without the interpreter lock has no such stable interface yet.
if not sysconfig.get_config_var("Py_GIL_DISABLED"):
    setup(ext_modules=COMPILED, options={"bdist_wheel": {"py_limited_api": "cp311"}})
else:
    setup()
