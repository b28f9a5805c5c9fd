"""Shards worked on by a Ray cluster instead of processes of this machine: an engine for `core/format/parallel.py`.

All machines need to see the dataset at the same path. Shards are independent, and each is written under another name
and then renamed, so a task that is killed or runs twice does no harm.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from energon_bridge.core.errors import ConfigurationError, EnergonError

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 3  # results per core that may wait for the caller: bounds memory
_RETRIES = 5  # of a shard whose process or machine is lost


class RayShardEngine:
    """Runs the work on shards as tasks of a Ray cluster.

    Args:
        address: Address of a cluster ("auto", "ray://host:10001"); None uses RAY_ADDRESS, or else starts a cluster on
            this machine.

    Raises:
        ConfigurationError: Ray is not installed, or there is no cluster at the address.
    """

    def __init__(self, address: str | None = None) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigurationError(f"--engine ray needs Ray: pip install 'energon-bridge[ray]' ({error})") from error
        self._ray: Any = ray
        if not ray.is_initialized():
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, ValueError, RuntimeError) as error:
                from energon_bridge.cloud.ray.ray_engine import no_cluster

                raise ConfigurationError(no_cluster(address, str(error))) from error

    def map_shards(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Generator[Result, None, None]:
        """Yield `function(item)` for every item, in order; a task whose process is lost runs again."""
        ray = self._ray
        call = ray.remote(max_retries=_RETRIES)(_call)
        shared = ray.put(function)
        ahead = _AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
        waiting: deque[Any] = deque()
        try:
            for item in items:
                if len(waiting) >= ahead:
                    yield self._result(waiting.popleft())
                waiting.append(call.remote(shared, item))
            while waiting:
                yield self._result(waiting.popleft())
        finally:
            for reference in waiting:
                ray.cancel(reference)

    def _result(self, reference: Any) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error  # the work's own error, as processes raise it
        except self._ray.exceptions.RayError as error:
            raise EnergonError(f"Ray lost the work on a shard {_RETRIES + 1} times: {error}") from error


def _call(function: Callable[[Item], Result], item: Item) -> Result:
    return function(item)
