"""Deployment scenarios on the cluster that ``KUBECONFIG`` selects.

``pytest -m cluster tests/cluster`` requires ``KUBECONFIG``, the right to create namespaces, and, in
``EVERNEAR_TEST_IMAGE``, this checkout's serving image by digest, which the cluster must be able to
pull. Each test creates a namespace with a random name and deletes it afterwards. Without the two
variables these tests are skipped. `tests/real/deployment/kubernetes` has the same on loopback.

`test_parts` runs steps on many nodes. It requires the training image, in
``EVERNEAR_TEST_TRAIN_IMAGE``, instead of the serving image.
"""
