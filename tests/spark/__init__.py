"""Tests that need Spark: one session for all of them. They carry the marker `spark` by lying here."""
