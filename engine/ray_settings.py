"""What a private Ray is told by environment, and where its files go. Ray itself is imported in `engine.workers`."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

_TEMP_ROOT_CHARACTERS = 18  # with more, Ray's socket paths may pass 107 characters


def set_private_environment() -> None:
    """Set what Ray reads, most of it while it is imported. What the user has set wins."""
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's coming default, without its warning
        "RAY_worker_niceness": "0",  # Ray says 15: the workers do all the work and would get none as soon as others run
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # one machine, as on those systems: bind loopback only
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray writes one into the home folder
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def temp_root() -> Path:
    """The user's temporary folder if it is short enough for Ray's sockets, else /tmp."""
    wanted = tempfile.gettempdir()
    return Path(wanted if len(wanted) + len(str(os.geteuid())) <= _TEMP_ROOT_CHARACTERS else "/tmp")
