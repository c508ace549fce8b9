"""Places that break a rule of style and are not mended yet; see `tests/unit/test_style.py`.

A place that is mended has to leave its list, and none may be added: these lists only get shorter.
"""

from __future__ import annotations

# By the name of the rule in `bench.house.rules`.
PLACES: dict[str, set[str]] = {
    "misnamed_modules": {
        "dmq.broker.delivery.channel:Consumption",
        "dmq.broker.delivery.rebalance:Dividing",
    },
    "duplicate_classes_in_package": {
        "dmq.client:Batch",
    },
    "half_classes": {
        "dmq.broker.delivery.cursor:HandOut",
        "dmq.broker.delivery.hand_out:Fetching",
    },
    "long_functions": {
        "dmq.broker.delivery.hand_out:Fetching._fetch",
    },
    "wide_functions": {
        "dmq.broker.delivery.channel:Consumption.__init__",
        "dmq.broker.delivery.cursor:DequeueLog.settled",
        "dmq.broker.delivery.cursor:HandOut.__init__",
        "dmq.broker.delivery.cursor:HandOut.grant",
        "dmq.broker.delivery.hand_out:find_doomed",
        "dmq.broker.delivery.hand_out:Fetching.__init__",
        "dmq.broker.delivery.hand_out:Fetching._fetch",
        "dmq.broker.delivery.hand_out:Fetching._doom",
        "dmq.broker.delivery.lease:Lease.__init__",
        "dmq.broker.delivery.waiters:WaitingPull.__init__",
        "dmq.broker.retry.mover:Moves.nack",
        "dmq.broker.retry.mover:Moves._bury_in_place",
        "dmq.broker.retry.mover:Moves._retry",
        "dmq.broker.retry.mover:Moves._bury",
        "dmq.broker.retry.mover:Moves._set_aside",
        "dmq.broker.wire.delays:store_aside",
        "dmq.broker.wire.session:Pusher.__init__",
        "dmq.client.aio.connection:AioConnection.submit",
        "dmq.client.connection.connection:Connection.submit",
        "dmq.client.consumer.follow:follow",
        "dmq.client.consumer.options:ConsumerOptions.__init__",
        "dmq.client.consumer.subscription:NamedLink.submit",
        "dmq.protocol.frame:frame_head",
        "dmq.protocol.frame:build_frame",
        "dmq.records.builder:build_record",
        "dmq.records.columns:verify_batch",
        "dmq.records.copy:CopyPlan.__init__",
        "dmq.records.encoder:make_shape",
        "dmq.records.encoder:remembered_shape",
        "dmq.records.encoder:encode_batch",
        "dmq.records.encoder:encode_plain",
        "dmq.records.move:moved_record",
        "dmq.records.replay:ReplayTarget.record",
        "dmq.storage.index.block_file:write_blocks",
    },
    "wrong_broker_takers": {
        "dmq.broker.catalog.catalog",
        "dmq.broker.catalog.key_values",
        "dmq.broker.dead_letters.dead_letters",
        "dmq.broker.dead_letters.resend",
        "dmq.broker.dead_letters.sql_drain",
        "dmq.broker.maintenance",
        "dmq.broker.retry.mover",
        "dmq.broker.schedule.delays",
        "dmq.broker.schedule.release_unit",
        "dmq.broker.schedule.transactions",
    },
    "import_cycles": {
        " ".join(
            [
                "dmq.broker.broker",
                "dmq.broker.catalog.catalog",
                "dmq.broker.catalog.key_values",
                "dmq.broker.dead_letters.dead_letters",
                "dmq.broker.dead_letters.resend",
                "dmq.broker.dead_letters.sql_drain",
                "dmq.broker.delivery.rebalance",
                "dmq.broker.journal.disk",
                "dmq.broker.journal.writer",
                "dmq.broker.retry.mover",
                "dmq.broker.schedule.delays",
                "dmq.broker.schedule.release_unit",
                "dmq.broker.schedule.transactions",
                "dmq.broker.wire.dispatcher",
                "dmq.broker.wire.session",
            ]
        ),
    },
}

# How many there are at most, by layer.
COUNTS: dict[str, dict[str, int]] = {
    "positional_calls": {
        "dmq.broker": 104,
        "dmq.client": 67,
        "dmq.protocol": 1,
        "dmq.records": 24,
        "dmq.storage": 34,
    },
    "vague_words": {
        "dmq.broker": 19,
        "dmq.client": 21,
        "dmq.protocol": 8,
        "dmq.records": 3,
        "dmq.storage": 8,
    },
    "silent_docstrings": {
        "dmq.broker": 24,
        "dmq.client": 10,
        "dmq.storage": 10,
    },
}
