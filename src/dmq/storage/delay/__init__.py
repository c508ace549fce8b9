"""Delay: `fragment`, `wheel`, `wheel_files`."""
