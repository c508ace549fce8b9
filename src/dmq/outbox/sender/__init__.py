"""The sender's side of the outbox.

In reading order: `service` is what a program calls, and notices commits; `message_row` is a row of the sender table,
and its number if it is strict, `envelope` what the outbox writes on a message. `relay` claims rows and sends them,
`dispatch` hands them to a broker. `result_book` listens for results, and writes them down.
"""
