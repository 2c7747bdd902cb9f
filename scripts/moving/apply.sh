#!/usr/bin/env bash
# Move, then let ruff sort imports and wrap lines.
set -euo pipefail
python scripts/moving/move.py
python scripts/moving/contract.py
ruff check --fix -q --select I,F401,RUF022 . || true
ruff format -q .
