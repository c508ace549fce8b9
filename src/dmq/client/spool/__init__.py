"""Spool: `drain`, `parcel`, `refused`, `sender`, `spool`."""
