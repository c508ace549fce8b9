"""The client: what runs in the processes that send and consume messages."""
