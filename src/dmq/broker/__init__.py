"""The broker: what happens to messages between the store and those who send and consume them."""
