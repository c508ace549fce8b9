"""Messages that are stored and not yet in their topic: delayed ones, and half messages of transactions.

In reading order: `delays` (the schedule and its workers), `transactions` (half messages, when producers are
asked, and how they end), `release_unit` (the unit that takes messages to their topics),
`leftovers` (what of a topic is not consumed yet).
"""
