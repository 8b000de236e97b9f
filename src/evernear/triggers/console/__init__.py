"""The console, a web application for viewing the system, recognizing images, naming
classes and promoting releases.

The console has no state. The console reads from the store and the servers. The console
makes changes through the interfaces that the commands also use: `evernear.review`,
`evernear.deployment`, local runs and Kubeflow Pipelines. The console imports neither
torch nor FAISS. `app` assembles the pages from `pages`. `access` decides what each user
may do.
"""
