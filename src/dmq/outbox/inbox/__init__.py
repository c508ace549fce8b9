"""The inbox: a message has its effect once, however often it is delivered. In reading order:

- `inbox`, `aio_inbox`: one message, in one transaction with its row; `./scripts/twins` writes `inbox` from `aio_inbox`
- `batch_inbox`: many messages in one transaction; `decorator`: an inbox made from an engine
- `consumption`, `recorder`: one consumption, also in a session of the user's own or in a strict sequence, and the
  statements that record it
"""
