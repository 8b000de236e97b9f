"""The console: one page where people see, try, name and decide.

It has no state. What it shows is read from the store and the servers, and what it changes goes through the same
functions as the commands: `evernear.review`, `evernear.deployment`, local runs and Kubeflow Pipelines. It imports
neither torch nor FAISS. `app` assembles the pages of `pages`, and `access` decides who may do what.
"""
