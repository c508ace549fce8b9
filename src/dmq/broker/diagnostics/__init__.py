"""What people see of a broker. Looking changes nothing.

In reading order: `metrics` (counters and gauges), `exposition` (the same for Prometheus), `disk_report` (the disk and
retention), `status_page` and `telnet` (for a person), `inquiry` (what happened to a message, and why it is not
consumed), `message_history` (all that is kept of it), `trace` (its steps), `whereabouts` (where it is in each group),
`explanation` (the sentences), `doctor` (what could keep a broker from running well on this machine), `registry_check`
(the same of the registry of a cluster), `node_load` (what the cluster is told of a broker's load).
"""
