"""`python -m etude` is the `etude` command."""

from __future__ import annotations

import sys

from etude.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
