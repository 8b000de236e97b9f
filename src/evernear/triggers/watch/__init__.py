"""Look at the source and at the live queries, decide what is to be done, and propose or start it.

::

    look.py       what is new, what drifted: all that a decision is made of
    decide.py     from that to retrain, reindex or nothing, by the thresholds of `evernear.settings.WatchSettings`
    act.py        propose or start it, once: cool-down, open proposals, runs under way
    watcher.py    a look from end to end, which outlives what fails
    service.py    the process that looks on a schedule and when the bucket tells of a change
    switch.py     on or off, and what the last look found; in the store
"""
