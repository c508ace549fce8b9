"""Repair: what the disk of one member lost is fetched from another one.

`answer` is what a member gives to one that asks; `mender` finds what is damaged, fetches it and writes it; `repairs`
says when; `scrubber` looks for damage all the time.
"""
