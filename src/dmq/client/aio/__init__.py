"""Aio: `admin`, `client`, `connection`, `consumer`, `executor`, `pool`, `producer`, `transaction`."""
