"""Admin: `admin`, `calls`, `dead_letters`, `doctor`, `key_values`, `reports`."""
