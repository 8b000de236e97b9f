"""The console, a web application for recognizing images, naming classes, viewing the data and
promoting releases.

The console has no state. It reads from the store and the servers. It makes changes through the
interfaces that the commands also use: `evernear.deployment`, local runs and Kubeflow Pipelines. It
imports neither torch nor FAISS. `server` assembles the pages. `access` decides what each user may
do. What users review and what they answered is in `evernear.review`.
"""
