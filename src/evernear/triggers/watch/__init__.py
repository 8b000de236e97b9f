"""The watcher: checks the source and the live queries, decides what to do, and proposes or starts it.

::

    observe.py           what changed in the source and what drifted: the input of a decision
    queries.py           the logged live queries of a release
    decide.py            retrain, reindex or nothing, by the thresholds of `evernear.settings.WatchSettings`
    proposals.py         propose or start it, once: cooldown, pending proposals, active runs
    watcher.py           a check from end to end
    service.py           the process: checks on a schedule, and when the bucket reports a change
    baker.py             compare a release with the one before it after a rollout, and roll back if it is worse
    metrics.py           accuracy in life, for Prometheus
    pod_metrics.py       the counters of the pods
    bucket_events.py     the notifications of a bucket
    schedule_state.py    on or off, and the last check; in the store
"""
