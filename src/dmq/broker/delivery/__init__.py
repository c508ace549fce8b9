"""Delivery: `bitmap`, `channel`, `cursor`, `group`, `hand_out`, `lease`, `queue_selection`, `rebalance`, `waiters`."""
