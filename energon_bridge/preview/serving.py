"""Pages of a preview over HTTP, for whoever cannot open the folder itself: on this machine only.

Nothing but the folder is served, ranges of files included, so that videos seek. Requests that name another host are
refused: a site that somebody visits cannot read the pages through their browser.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from energon_bridge.errors import ConfigurationError

_HOSTS = ("127.0.0.1", "localhost")


def server_of_pages() -> Callable[[Path, int, Callable[[str], None]], None]:
    """Return what serves a folder at a port (0: any) until it is interrupted, and calls back with the address.

    Raises:
        ConfigurationError: starlette or uvicorn is not installed.
    """
    try:
        import uvicorn
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.routing import Mount
        from starlette.staticfiles import StaticFiles
    except ImportError as error:
        raise ConfigurationError("--serve needs starlette and uvicorn: pip install 'energon-bridge[view]'") from error

    def serve(folder: Path, port: int, say: Callable[[str], None]) -> None:
        own_host: Any = Middleware(TrustedHostMiddleware, allowed_hosts=list(_HOSTS))
        application = Starlette(routes=[Mount("/", StaticFiles(directory=folder, html=True))], middleware=[own_host])
        try:
            listening = socket.create_server((_HOSTS[0], port))
        except OSError as error:
            raise ConfigurationError(f"--port {port} cannot be used: {error.strerror}; give another, or 0") from error
        with closing(listening), suppress(KeyboardInterrupt):  # which is how it ends
            say(f"http://{_HOSTS[0]}:{listening.getsockname()[1]}/")
            uvicorn.Server(uvicorn.Config(application, log_level="warning")).run(sockets=[listening])

    return serve
