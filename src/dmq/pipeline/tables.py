"""The archive's tables: their columns, and the folders they lie in below the archive's address.

One row of `message` is one message stored in a topic of users; copies that the broker makes on a message's way
(delayed, half, retried, dead) are rows of `copy`, without the body. `dt` is the day of the store time, UTC, and every
file holds one `dt`. Times are microseconds in UTC.

What always holds: columns are only ever added, at the end. A message id is its text, as `str(message.id)` gives it.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

__all__ = [
    "ARCHIVED",
    "CONSUME_EVENT",
    "COPY",
    "DEAD_LETTER_DAILY",
    "DEAD_LETTER_PART",
    "KEY_DIRECTORY",
    "KEY_INDEX",
    "MESSAGE",
    "METRICS_1M",
    "POSITION_DAILY",
    "RECONCILE_DIFF",
    "ROLLUP_PART",
    "SCHEMAS",
    "TRACE",
]

MESSAGE: Final = "message"
COPY: Final = "copy"
CONSUME_EVENT: Final = "consume_event"
KEY_INDEX: Final = "key_index"
KEY_DIRECTORY: Final = "key_directory"
TRACE: Final = "trace"
ROLLUP_PART: Final = "rollup_part"
METRICS_1M: Final = "metrics_1m"
POSITION_DAILY: Final = "position_daily"
DEAD_LETTER_PART: Final = "dead_letter_part"
DEAD_LETTER_DAILY: Final = "dead_letter_daily"
RECONCILE_DIFF: Final = "reconcile_diff"

ARCHIVED: Final = (MESSAGE, COPY, KEY_INDEX, CONSUME_EVENT)  # from brokers; the others are made of these

_TIME: Final = pa.timestamp("us", tz="UTC")
_HEADERS: Final = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))

_PLACE: Final = [
    pa.field("broker", pa.string()),  # the journal's id, 16 hex digits
    pa.field("journal_offset", pa.int64()),
    pa.field("topic", pa.string()),
    pa.field("topic_id", pa.int64()),  # the topic's incarnation
    pa.field("queue", pa.int32()),
    pa.field("queue_offset", pa.int64()),
]

SCHEMAS: Final[dict[str, pa.Schema]] = {
    MESSAGE: pa.schema(
        [
            pa.field("message_id", pa.string()),
            *_PLACE,
            pa.field("key", pa.string()),
            pa.field("business_id", pa.string()),
            pa.field("tag", pa.string()),
            pa.field("app", pa.string()),
            pa.field("priority", pa.int32()),
            pa.field("flags", pa.int32()),
            pa.field("client", pa.string()),  # host:port
            pa.field("sent_at", _TIME),
            pa.field("received_at", _TIME),
            pa.field("stored_at", _TIME),
            pa.field("body_crc", pa.int64()),  # CRC-32C of the body as it is in this table
            pa.field("headers", _HEADERS),  # the user's properties
            pa.field("body", pa.binary()),  # uncompressed
            pa.field("dt", pa.date32()),
        ]
    ),
    COPY: pa.schema(
        [
            pa.field("message_id", pa.string()),
            *_PLACE,  # of the copy: a topic of ours
            pa.field("origin_topic", pa.string()),  # the users' topic it came from or goes to
            pa.field("group", pa.string()),
            pa.field("attempt", pa.int32()),
            pa.field("due_at", _TIME),
            pa.field("reason", pa.string()),  # of a dead letter: RETRIES_EXHAUSTED, …
            pa.field("error", pa.string()),
            pa.field("stored_at", _TIME),
            pa.field("dt", pa.date32()),
        ]
    ),
    CONSUME_EVENT: pa.schema(
        [
            pa.field("message_id", pa.string()),  # null: its message was gone before it could be looked up
            pa.field("topic", pa.string()),  # the users' topic, also where a retry was delivered
            pa.field("group", pa.string()),
            pa.field("member", pa.string()),
            pa.field("attempt", pa.int32()),
            pa.field("outcome", pa.string()),  # delivered, acked, failed, dead, expired, skipped
            pa.field("at", _TIME),
            pa.field("error", pa.string()),
            pa.field("broker", pa.string()),
            pa.field("journal_offset", pa.int64()),  # of the event
            pa.field("dt", pa.date32()),  # of the event's store time
        ]
    ),
    KEY_INDEX: pa.schema(
        [
            pa.field("bucket", pa.int32()),
            pa.field("hash", pa.int64()),
            pa.field("kind", pa.string()),  # key, business_id or message_id
            pa.field("key", pa.string()),
            pa.field("message_id", pa.string()),
            pa.field("topic", pa.string()),
            pa.field("queue", pa.int32()),
            pa.field("queue_offset", pa.int64()),
            pa.field("broker", pa.string()),
            pa.field("journal_offset", pa.int64()),
            pa.field("dt", pa.date32()),
        ]
    ),
    KEY_DIRECTORY: pa.schema(
        [
            pa.field("hash", pa.int64()),  # the top 40 bits of a hash of the index; null where a file is named
            pa.field("file", pa.int32()),  # the number of a file of the index, within the run
            pa.field("path", pa.string()),  # that file, below the index's folder; null where a hash is
            pa.field("dt", pa.date32()),  # the last day that the run has a file of
        ]
    ),
    TRACE: pa.schema(
        [
            pa.field("message_id", pa.string()),
            pa.field("topic", pa.string()),
            pa.field("group", pa.string()),
            pa.field("sent_at", _TIME),
            pa.field("stored_at", _TIME),
            pa.field("delivered_at", _TIME),  # the first time
            pa.field("acked_at", _TIME),
            pa.field("store_latency_ms", pa.int64()),
            pa.field("delivery_latency_ms", pa.int64()),
            pa.field("ack_latency_ms", pa.int64()),
            pa.field("attempts", pa.int32()),
            pa.field("outcome", pa.string()),  # the last one
            pa.field("last_error", pa.string()),
            pa.field("dt", pa.date32()),
            pa.field("outcome_at", _TIME),
            pa.field("error_at", _TIME),
        ]
    ),
    # What `metrics_1m` and `position_daily` are made of: sums and greatest values by minute that add up, so that
    # what is new is a few rows more. `kind` says which columns a row has.
    ROLLUP_PART: pa.schema(
        [
            pa.field("kind", pa.string()),  # in, out, end, position, retry
            pa.field("minute", _TIME),
            pa.field("topic", pa.string()),
            pa.field("app", pa.string()),
            pa.field("group", pa.string()),
            pa.field("broker", pa.string()),
            pa.field("topic_id", pa.int64()),
            pa.field("queue", pa.int32()),
            pa.field("place", pa.int64()),  # offset after the last message of `end` and `position`; of the message
            pa.field("message_id", pa.string()),  # of `retry`, as the two that follow
            pa.field("attempt", pa.int32()),
            pa.field("outcome", pa.string()),  # of `out`, too
            pa.field("at", _TIME),  # of `retry`: when it happened; of `position`: the last of them
            pa.field("count", pa.int64()),  # of `in` and `out`, as all that follow
            pa.field("bytes", pa.int64()),
            pa.field("took_ms", pa.int64()),  # latency, rounded
            pa.field("took_max_ms", pa.int64()),  # the greatest that was rounded to it
            pa.field("dt", pa.date32()),
        ]
    ),
    METRICS_1M: pa.schema(
        [
            pa.field("minute", _TIME),
            pa.field("topic", pa.string()),
            pa.field("app", pa.string()),  # of rows about what came in
            pa.field("group", pa.string()),  # of rows about what went out
            pa.field("messages_in", pa.int64()),
            pa.field("bytes_in", pa.int64()),
            pa.field("messages_out", pa.int64()),
            pa.field("retries", pa.int64()),
            pa.field("dead", pa.int64()),
            pa.field("latency_p50_ms", pa.float64()),  # stored → acked of rows with a group, sent → stored of others
            pa.field("latency_p99_ms", pa.float64()),
            pa.field("latency_max_ms", pa.float64()),
            pa.field("lag", pa.int64()),  # of the group at the end of the minute
            pa.field("dt", pa.date32()),
        ]
    ),
    POSITION_DAILY: pa.schema(
        [
            pa.field("topic", pa.string()),
            pa.field("group", pa.string()),
            pa.field("broker", pa.string()),
            pa.field("topic_id", pa.int64()),
            pa.field("queue", pa.int32()),
            pa.field(
                "queue_end", pa.int64()
            ),  # offset after the last message stored in the queue by the end of the day
            pa.field("position", pa.int64()),  # offset after the last message that the group settled in it
            pa.field("retrying", pa.int64()),  # of the messages below it, how many failed and wait to be tried again
            pa.field("settled_at", _TIME),  # when the group last settled something of the queue
            pa.field("dt", pa.date32()),
        ]
    ),
    # What `dead_letter_daily` is made of. A row counts letters with an error, or names one as a sample.
    DEAD_LETTER_PART: pa.schema(
        [
            pa.field("topic", pa.string()),
            pa.field("group", pa.string()),
            pa.field("reason", pa.string()),
            pa.field("error", pa.string()),  # its first line
            pa.field("count", pa.int64()),
            pa.field("message_id", pa.string()),  # of a sample
            pa.field("stored_at", _TIME),  # of a sample
            pa.field("dt", pa.date32()),
        ]
    ),
    DEAD_LETTER_DAILY: pa.schema(
        [
            pa.field("topic", pa.string()),
            pa.field("group", pa.string()),
            pa.field("reason", pa.string()),
            pa.field("count", pa.int64()),
            pa.field(
                "top_errors",
                pa.list_(pa.struct([pa.field("error", pa.string()), pa.field("count", pa.int64())])),
            ),
            pa.field("samples", pa.list_(pa.string())),  # message ids
            pa.field("dt", pa.date32()),
        ]
    ),
    RECONCILE_DIFF: pa.schema(
        [
            pa.field("run_id", pa.string()),
            pa.field("found_at", _TIME),
            pa.field(
                "problem", pa.string()
            ),  # not_sent, not_archived, not_consumed, no_result, result_differs, unknown
            pa.field("send_id", pa.string()),
            pa.field("message_id", pa.string()),
            pa.field("topic", pa.string()),
            pa.field("group", pa.string()),
            pa.field("business_id", pa.string()),
            pa.field("sender_state", pa.string()),
            pa.field("consumer_state", pa.string()),
            pa.field("detail", pa.string()),
            pa.field("dt", pa.date32()),
        ]
    ),
}
