"""Repair: `compensator`, `confirm_client`, `confirm_service`, `confirm_wire`, `purge`, `table_reader`."""
