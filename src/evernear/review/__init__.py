"""What users review and what they answered: uncertain live queries, suspect labels and live labels.

`queue` has the images to label, and `groups` those that look alike. `answers` records the answers
and applies them to the source through `label_target`. `suspects` lists labels that look wrong, and
`live_labels` the true labels of live queries. The console shows them; the watcher, the pipeline and
the commands read them.
"""
