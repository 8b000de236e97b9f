"""The Slack bot, which starts runs after confirmation, follows them and reports their verdicts.

`app` acknowledges a command or a click as soon as its request is in the store
(`evernear.triggers.requests`). `worker` advances every open request by one state per poll:
`prompts` asks for confirmation, `runs` starts, follows and stops runs, and `promotions` moves the
champion. To follow a run from its prompt to its verdict, read `commands.retrain`, then `prompts`,
then `runs.RunTracker`.
"""
