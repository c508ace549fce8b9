"""Aio: `admin`, `client`, `connection`, `consumer`, `executor`, `key_values`, `pool`, `producer`, `transaction`."""
