"""Tests of what producers send."""
