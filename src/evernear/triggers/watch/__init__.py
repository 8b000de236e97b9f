"""The watcher: check the source and the live queries, choose an action, and propose or
start the action.

::

    observe.py           changes of the source, and drift: the input of a decision
    decide.py            retrain, reindex or no action, by the thresholds of `evernear.settings.WatchSettings`
    proposals.py         propose or start an action once: cooldown, pending proposals, active runs
    watcher.py           a check from end to end, and the process that repeats it
    baker.py             after a rollout, compare a release with the previous release, and roll back if it is worse
    pod_metrics.py       the counters of the pods
    schedule_state.py    on or off, and the last check, in the store
"""  # noqa: W505
