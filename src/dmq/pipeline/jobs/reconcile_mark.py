"""Where the log of `reconcile_diff` tells when tables and archive were last compared, also if everything agreed."""

from __future__ import annotations

from typing import Final

__all__ = ["APP_ID"]

APP_ID: Final = "dmq-reconcile"  # its version is the moment of the last run, in milliseconds
