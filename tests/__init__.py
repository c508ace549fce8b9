"""Tests: unit (pure), contract (one suite, all implementations), integration (real processes), fault (seeded)."""
