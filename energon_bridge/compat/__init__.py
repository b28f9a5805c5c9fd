"""`megatron.energon` by energon_bridge: code that was written for megatron-energon runs as it is.

`install()` puts an import hook in place (`finder`); from then on `import megatron.energon` and its modules give the
objects of this package (`table` says for each name which), small adapters where arguments differ (`loading`, `worker`,
`preparing`, `records`, `epath`), or names that refuse to be used and say what takes their place (`refused`).
`python -m energon_bridge.compat SCRIPT` does it for a program that is not to be touched. The list is
docs/reference/compat.md.
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
    """Let `import megatron.energon` give the objects of energon_bridge, in this process and those forked from it.

    Call it before anything imports `megatron.energon`; a second call only changes `trust_remote_code`. Other parts of
    the namespace package, such as `megatron.core`, are found as before. An installed megatron-energon is passed over,
    which the log says.

    Args:
        trust_remote_code: Let `sample_loader.py`, part filters and classes that datasets name run, as megatron-energon
            always does, where the code does not say `trust_remote_code=` itself.

    Raises:
        ConfigurationError: The real megatron-energon is imported already.
    """
    finder = installed()
    if finder is not None:
        finder.trust_remote_code = trust_remote_code
        return
    imported = sys.modules.get(PACKAGE)
    if imported is not None:
        raise ConfigurationError(
            f"{PACKAGE} is imported already, from {imported.__file__}: call energon_bridge.compat.install() before "
            "anything that imports it, or run the program by `python -m energon_bridge.compat SCRIPT`"
        )
    other = other_package()
    if other is not None:
        logger.warning("megatron-energon is installed (%s); energon_bridge takes its place in this process", other)
    sys.meta_path.insert(0, Finder(trust_remote_code=trust_remote_code))
    sys.meta_path.append(NamespaceFinder())
