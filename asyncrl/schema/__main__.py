"""`python -m asyncrl.schema` prints the JSON schema of recipes."""

from __future__ import annotations

import sys

from asyncrl.schema import main

sys.exit(main())
