"""`megatron.energon` served by energon_bridge: code written for megatron-energon runs unchanged.

`install()` adds an import hook (`finder`). From then on, `import megatron.energon` and its modules return the objects
of this package (`table` maps the names), small adapters if arguments differ (`loading`, `worker`, `preparing`,
`records`, `epath`), or names that raise when used and say what to use instead (`refused`). `python -m
energon_bridge.compat SCRIPT` does the same for a program that you do not want to change. docs/reference/compat.md lists
all names.
"""

from __future__ import annotations

import logging
import sys

from energon_bridge.compat.finder import Finder, NamespaceFinder, installed, other_package
from energon_bridge.compat.refused import PACKAGE
from energon_bridge.errors import ConfigurationError

__all__ = ["install"]

logger = logging.getLogger(__name__)


def install(*, trust_remote_code: bool = False) -> None:
    """Make `import megatron.energon` return the objects of energon_bridge, in this process and its forks.

    Call it before anything imports `megatron.energon`; a second call only changes `trust_remote_code`. Other parts of
    the namespace package, such as `megatron.core`, are found as before. An installed megatron-energon is ignored, with
    a warning.

    Args:
        trust_remote_code: Run `sample_loader.py`, part filters and classes that datasets name, as megatron-energon
            always does, unless the code passes `trust_remote_code=` itself.

    Raises:
        ConfigurationError: The real megatron-energon has already been imported.
    """
    finder = installed()
    if finder is not None:
        finder.trust_remote_code = trust_remote_code
        return
    imported = sys.modules.get(PACKAGE)
    if imported is not None:
        raise ConfigurationError(
            f"{PACKAGE} is already imported, from {imported.__file__}: call energon_bridge.compat.install() before "
            "anything imports it, or run the program with `python -m energon_bridge.compat SCRIPT`"
        )
    other = other_package()
    if other is not None:
        logger.warning("megatron-energon is installed (%s); energon_bridge replaces it in this process", other)
    sys.meta_path.insert(0, Finder(trust_remote_code=trust_remote_code))
    sys.meta_path.append(NamespaceFinder())
