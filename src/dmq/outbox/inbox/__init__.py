"""Inbox: `aio_inbox`, `batch_inbox`, `consumption`, `decorator`, `gap_policy`, `inbox`, `prepared`, `recorder`,
`sequence_lock`."""
