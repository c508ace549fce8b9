"""What a member does in each of its roles.

In reading order: `post` is what all of them share; `intake` follows a leader over one connection; `candidacy` stands
for election; `term` leads one epoch, and `leader_report` tells of it.
"""
