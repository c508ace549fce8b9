"""Tests of dmq.protocol."""
