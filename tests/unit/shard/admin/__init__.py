"""Tests of `dmq.shard.admin`."""
