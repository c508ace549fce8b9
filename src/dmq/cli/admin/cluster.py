"""`dmq cluster`: the brokers there are."""

from __future__ import annotations

from dmq.cli.options import DEFAULT_URL, Format, Formatted, Url, connected, make_app
from dmq.cli.output import show_rows

__all__ = ["app"]

app = make_app("List the brokers.")


@app.command()
def cluster(url: Url = DEFAULT_URL, form: Formatted = Format.TABLE) -> None:
    """List the brokers, the one that answered first."""
    with connected(url, any_member=True) as client:
        rows = [
            {
                "broker": broker.name,
                "address": broker.address,
                "shard": broker.shard or None,
                "leader": broker.is_leader,
                "writable": broker.is_writable,
                "state": broker.state,
            }
            for broker in client.admin.cluster()
        ]
    show_rows(rows, form, empty="no brokers")
