"""Sender: `claims`, `commit_hints`, `commit_hook`, `decorator`, `dispatch`, `envelope`, `message_row`, `relay`,
`result_book`, `result_consumers`, `sequence`, `service`."""
