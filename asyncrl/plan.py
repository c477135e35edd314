"""`asyncrl plan`, the same as `python -m engine.plan`: what it costs to bring a model from one layout to another."""

from __future__ import annotations

import sys

from engine.plan_command import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
