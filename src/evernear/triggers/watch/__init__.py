"""The watcher: check the source and the live queries, choose an action, and propose or start it.

::

    observe.py           changes of the source, drift and live accuracy: the input of a decision
    drift.py             whether live queries differ from the reference
    decide.py            retrain, reindex or no action, by the thresholds of `evernear.settings.WatchSettings`
    proposals.py         propose or start an action once: cooldown, pending proposals, active runs
    watcher.py           a check from end to end, and the process that repeats it
    baker.py             after a rollout, compare a release with the previous release, and roll back if it is worse
    schedule_state.py    on or off, and the last check, in the store
"""  # noqa: W505
