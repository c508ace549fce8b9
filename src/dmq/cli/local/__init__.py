"""Commands on what is on this machine or in a database, without a broker: `config`, `journal`, `spool`, `outbox`."""
