"""The producer: from a call of a user to a batch that a broker has stored.

In reading order: `producer` is what a blocking program holds, and `core` what it shares with the one on an event loop.
`straight_path` is the way of a lone send.
`message` checks what is sent, `routes` chooses its queue. The `accumulator` gathers messages into batches and numbers
them; the `encoder` turns a batch into bytes; the `sender` sees it through, by the `retry_policy`. `numbered_sender` is
one attempt to send a batch with numbers, for everybody who sends such batches, and sends ready-made ones, for Spark and
replays. `outcome` is what becomes of a batch, `future` what a caller gets.
`transaction` and `transaction_core` are half messages and their ends. The `signal_mender` sees to what an exception out
of a signal's handler left half done.
"""
