"""Diagnostics: `doctor`, `explanation`, `message_history`, `metrics`, `status_page`, `telnet`, `trace`,
`whereabouts`."""
