"""What people see of a broker. Looking changes nothing.

In reading order: `metrics` (counters and gauges), `exposition` (the same for Prometheus), `disk_report` (the disk and
retention), `status_page` and `telnet` (for a person), `inquiry` (what happened to a message, where it is in each group,
and why it is not consumed), `message_history` (all that is kept of it, and its steps), `explanation` (the
sentences), `doctor` (what could keep a broker from running well on this machine, or in its cluster).
"""
