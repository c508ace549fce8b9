"""The query of job `reconcile`, over views of what four sides know.

{send}, {result}: the sender's tables; {consumer}: the consumers'; {archived}: messages of the archive that carry a send
id; {settled}: message and group that a broker saw acked. What is too young to be judged, and what lies before the
archive begins, is not in them, or is marked so.

What always holds: for a message and group at most one row, for what went wrong first: what was never sent is not also
missing at the consumers. A group none of whose rows are here is not judged by its table, which may be elsewhere.
"""

from __future__ import annotations

from typing import Final

__all__ = ["DIFFERENCES"]

# One row for each group that is to answer for a message; NULL stands for any one.
_EXPECTED: Final = """
    SELECT s.*, nullif(trim(g.name), '') AS `group`
    FROM {send} s LATERAL VIEW OUTER explode(
        CASE WHEN s.expected_groups IS NULL THEN array(CAST(NULL AS STRING))
             WHEN trim(s.expected_groups) = '' THEN array()
             ELSE split(s.expected_groups, ',') END) g AS name
"""

DIFFERENCES: Final = f"""
    WITH stored AS (
        SELECT send_id, min(message_id) AS message_id, min(topic) AS topic, min(business_id) AS business_id
        FROM {{archived}} GROUP BY send_id
    ), sent AS (
        SELECT s.*, a.message_id FROM {{send}} s LEFT JOIN stored a ON s.send_id = a.send_id
    ), asked AS (
        SELECT e.send_id, e.topic, e.business_id, e.state, a.message_id,
               coalesce(e.`group`, c.consumer_group) AS `group`, c.business_state AS consumer_state
        FROM ({_EXPECTED}) e LEFT JOIN stored a ON e.send_id = a.send_id
        LEFT JOIN {{consumer}} c
            ON e.send_id = c.send_id AND (e.`group` IS NULL OR e.`group` = c.consumer_group)
        WHERE e.state <> 'NEW' AND coalesce(trim(e.expected_groups) <> '', TRUE)
    ), on_the_way AS (
        SELECT 'not_sent' AS problem, send_id, message_id, topic, CAST(NULL AS STRING) AS `group`, business_id,
               state AS sender_state, CAST(NULL AS STRING) AS consumer_state,
               concat(CASE WHEN message_id IS NULL THEN 'committed, but no broker has it'
                           ELSE 'a broker has it, but the sender does not know' END,
                      CASE WHEN attempts > 0 THEN concat('; sent ', attempts, ' times') ELSE '' END,
                      CASE WHEN last_error <> '' THEN concat('; ', left(last_error, 200)) ELSE '' END) AS detail
        FROM sent WHERE state = 'NEW'
        UNION ALL
        SELECT 'not_archived', send_id, NULL, topic, NULL, business_id, state, NULL,
               'sent, but not in the archive'
        FROM sent WHERE state <> 'NEW' AND message_id IS NULL AND is_covered
    ), consumed AS (
        SELECT 'not_consumed' AS problem, a.send_id, a.message_id, a.topic, a.`group`, a.business_id,
               a.state AS sender_state, a.consumer_state,
               CASE WHEN t.message_id IS NULL THEN 'no consumer has it in its table'
                    ELSE 'a broker saw it acked, but the consumer table has no row' END AS detail
        FROM asked a LEFT JOIN {{settled}} t ON a.message_id = t.message_id AND a.`group` = t.`group`
        LEFT ANTI JOIN {{result}} r
            ON a.send_id = r.send_id AND (a.`group` IS NULL OR a.`group` = r.consumer_group)
        WHERE coalesce(a.consumer_state, 'UNKNOWN') = 'UNKNOWN' AND (a.message_id IS NOT NULL OR NOT :has_archive)
          AND :has_consumers
        UNION ALL
        SELECT 'no_result', a.send_id, a.message_id, a.topic, a.`group`, a.business_id, a.state, a.consumer_state,
               'consumed, but the sender has no result'
        FROM asked a LEFT ANTI JOIN {{result}} r ON a.send_id = r.send_id AND a.`group` = r.consumer_group
        WHERE a.consumer_state IN ('SUCCESS', 'ROLLBACK')
        UNION ALL
        SELECT 'result_differs', c.send_id, s.message_id, c.topic, c.consumer_group, c.business_id, s.state,
               c.business_state, concat('the sender was told ', r.business_state)
        FROM {{consumer}} c JOIN {{result}} r ON c.send_id = r.send_id AND c.consumer_group = r.consumer_group
        LEFT JOIN sent s ON c.send_id = s.send_id
        WHERE c.business_state <> r.business_state AND c.business_state <> 'UNKNOWN'
        UNION ALL
        SELECT 'result_differs', s.send_id, s.message_id, s.topic, r.consumer_group, s.business_id, s.state, NULL,
               concat('the sender was told ', r.business_state, ', but the consumer table has no row')
        FROM sent s JOIN {{result}} r ON s.send_id = r.send_id
        LEFT SEMI JOIN {{consumer}} k ON r.consumer_group = k.consumer_group
        LEFT ANTI JOIN {{consumer}} c ON r.send_id = c.send_id AND r.consumer_group = c.consumer_group
        UNION ALL
        SELECT 'result_differs', s.send_id, s.message_id, s.topic, r.consumer_group, s.business_id, s.state, NULL,
               'done, although a group rolled back'
        FROM sent s JOIN {{result}} r ON s.send_id = r.send_id
        LEFT SEMI JOIN {{consumer}} c
            ON c.send_id = r.send_id AND c.consumer_group = r.consumer_group AND c.business_state = r.business_state
        WHERE s.state = 'DONE' AND r.business_state = 'ROLLBACK'
    ), strangers AS (
        SELECT 'unknown' AS problem, c.send_id, a.message_id, c.topic, c.consumer_group AS `group`, c.business_id,
               CAST(NULL AS STRING) AS sender_state, c.business_state AS consumer_state,
               'consumed, but no sender has it' AS detail
        FROM {{consumer}} c LEFT JOIN stored a ON c.send_id = a.send_id
        LEFT ANTI JOIN {{send}} s ON c.send_id = s.send_id
        UNION ALL
        SELECT 'unknown', a.send_id, a.message_id, a.topic, NULL, a.business_id, NULL, NULL,
               'in the archive, but no sender has it'
        FROM stored a LEFT ANTI JOIN {{send}} s ON a.send_id = s.send_id
        LEFT ANTI JOIN {{consumer}} c ON a.send_id = c.send_id
    )
    SELECT * FROM on_the_way UNION ALL SELECT * FROM consumed UNION ALL SELECT * FROM strangers
"""
