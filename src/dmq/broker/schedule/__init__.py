"""Messages that are stored and not yet in their topic: delayed ones, and half messages of transactions.

In reading order: `delays` (the schedule and its workers), `transactions` (half messages, and how they end),
`transaction_checks` (when producers are asked), `release_unit` (the unit that takes messages to their topics),
`leftovers` (what of a topic is not consumed yet).
"""
