"""The console, a web page on which users view the system, try images,
name classes and make decisions.

The console has no state. It reads from the store and the servers, and makes changes
through the same functions as the commands: `evernear.review`, `evernear.deployment`,
local runs and Kubeflow Pipelines. It imports neither torch nor FAISS. `app` assembles
the pages from `pages`, and `access` decides which user may do what.
"""
