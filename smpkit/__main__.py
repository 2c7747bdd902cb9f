"""`python -m smpkit` is `smpkit`."""

from __future__ import annotations

from smpkit.cli.main import main

if __name__ == "__main__":
    main()
