"""The Slack bot, which starts runs after confirmation, follows the runs, and reports
their verdicts.

::

    Slack ─> handlers.py    identify the caller, check the permission, run the command or button, acknowledge
                 │              routes.py: the registry of commands and buttons
                 v              commands.py: the slash commands
             the store      requests (`evernear.triggers.requests`)
                 │
                 v
             worker.py      advances every open request by one state per poll ─> Slack
                                prompts.py: ask for confirmation
                                runs.py: start, follow, stop
                                promotions.py: promote, roll back

    blocks.py      Block Kit, escaping         access.py      the allow-lists
    client.py      Slack's Web API             services.py    the dependencies of all of these
    server.py      the process                 heartbeat.py   its health, for `evernear slack ready`

Each handler is in the same module as its messages. To follow a run from its prompt to
its verdict, read `commands.retrain`, then `prompts`, then `runs.RunTracker`.
"""  # noqa: W505
