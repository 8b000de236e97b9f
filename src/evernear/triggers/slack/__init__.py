"""The Slack bot: starts runs when a person says so, follows them, tells the verdict.

::

    Slack -> app.py       a command, a click: who is it, may they, write it down, acknowledge
             inbox.py     what was asked for, in the store
             worker.py    carries it out, follows runs, asks what the watcher proposes -> Slack

    messages.py    everything that is shown, as functions from facts to Block Kit
    answers.py     /evernear status, runs, champion: looked up and not kept
    access.py      the allow-lists
    web.py         Slack's Web API
    server.py      the process; health.py its heartbeat

Read `app.Desk.retrain`, then `worker.Worker` from `_ask` to `_tell_verdict`: that is a run from question to verdict.
"""
